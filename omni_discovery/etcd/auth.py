"""Tokens: authentication to etcd. A token is fetched when the first call needs it, and again when etcd rejects it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import grpc

from omni_discovery.errors import RegistryLoginError, RegistryRefusedError, RegistryUnavailableError
from omni_discovery.etcd._rpc import rpc
from omni_discovery.etcd.channel import EndpointChannel

logger = logging.getLogger(__name__)

#: gRPC metadata: names and values that are sent with a call.
Metadata = Sequence[tuple[str, str]]


class Tokens:
    """The token of one connection. Calls that need one at the same time share one login."""

    def __init__(self, user: str, password: str, timeout_s: float) -> None:
        self._user = user
        self._password = password
        self._timeout_s = timeout_s
        #: None until fetched; empty where no user is configured, or etcd has authentication switched off.
        self._token: str | None = None if user else ""
        self._login: asyncio.Task[str] | None = None

    async def metadata(self, channel: EndpointChannel) -> Metadata:
        """The metadata of a call on ``channel``. Raise RegistryLoginError, or RegistryUnavailableError: nothing ran."""
        if self._token is None:
            if self._login is None:
                self._login = asyncio.create_task(self._fetch(channel), name=f"etcd-login-{channel.endpoint}")
                self._login.add_done_callback(self._store_token)
            # Other calls wait for the same login: the cancellation of one must not end it.
            await asyncio.shield(self._login)
        return (("token", self._token),) if self._token else ()

    def reject(self, metadata: Metadata) -> bool:
        """A call with ``metadata`` was refused; return whether it may succeed with a new token.

        Servers report an expired token in several ways, "permission denied" among them, so each refusal is worth one
        new login.
        """
        if not self._user:
            return False
        if metadata == ((("token", self._token),) if self._token else ()):
            self._token = None
        return True

    def _store_token(self, login: asyncio.Task[str]) -> None:
        self._login = None
        if not login.cancelled() and login.exception() is None:
            self._token = login.result()

    async def _fetch(self, channel: EndpointChannel) -> str:
        request = rpc.AuthenticateRequest(name=self._user, password=self._password)
        try:
            response = await channel.auth.Authenticate(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            mapped = channel.explain(error)
            if isinstance(mapped, RegistryRefusedError) and "authentication is not enabled" in str(mapped):
                logger.warning("etcd.no_users endpoint=%s user=%s is not asked for", channel.endpoint, self._user)
                return ""
            if isinstance(mapped, RegistryUnavailableError):
                # Only the login may have run, never the call that needed it.
                mapped.may_have_run = False
            if isinstance(mapped, RegistryLoginError):
                raise RegistryLoginError(f"{mapped} (user {self._user!r})") from None
            raise mapped from None
        return str(response.token)
