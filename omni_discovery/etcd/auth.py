"""Who we are for etcd: a token, fetched when the first call needs it, and fetched anew when etcd takes it no longer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import grpc

from omni_discovery.errors import RegistryLoginError, RegistryRefusedError, RegistryUnavailableError
from omni_discovery.etcd._rpc import rpc
from omni_discovery.etcd.channel import Line

logger = logging.getLogger(__name__)

#: What is sent along with a call.
Metadata = Sequence[tuple[str, str]]


class Tokens:
    """The token of one connection. Calls that need one at the same time share one login."""

    def __init__(self, user: str, password: str, timeout_s: float) -> None:
        self._user = user
        self._password = password
        self._timeout_s = timeout_s
        #: None until fetched; empty where etcd asks nobody who he is.
        self._token: str | None = None if user else ""
        self._login: asyncio.Task[str] | None = None

    async def metadata(self, line: Line) -> Metadata:
        """What to send with a call on ``line``. Raise RegistryLoginError, or RegistryUnavailableError: nothing ran."""
        if self._token is None:
            if self._login is None:
                self._login = asyncio.create_task(self._fetch(line), name=f"etcd-login-{line.endpoint}")
                self._login.add_done_callback(self._take)
            # Whoever is cancelled leaves the login to the others.
            await asyncio.shield(self._login)
        return (("token", self._token),) if self._token else ()

    def reject(self, metadata: Metadata) -> bool:
        """A call with ``metadata`` was refused; say whether a new token may change that.

        Servers say "denied" of a token that has ended, and tell of it in several ways, so each refusal is worth one
        new login.
        """
        if not self._user:
            return False
        if metadata == ((("token", self._token),) if self._token else ()):
            self._token = None
        return True

    def _take(self, login: asyncio.Task[str]) -> None:
        self._login = None
        if not login.cancelled() and login.exception() is None:
            self._token = login.result()

    async def _fetch(self, line: Line) -> str:
        request = rpc.AuthenticateRequest(name=self._user, password=self._password)
        try:
            response = await line.auth.Authenticate(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            mapped = line.explain(error)
            if isinstance(mapped, RegistryRefusedError) and "authentication is not enabled" in str(mapped):
                logger.warning("etcd.no_users endpoint=%s user=%s is not asked for", line.endpoint, self._user)
                return ""
            if isinstance(mapped, RegistryUnavailableError):
                # Only the login may have run, never the call that wanted it.
                mapped.may_have_run = False
            if isinstance(mapped, RegistryLoginError):
                raise RegistryLoginError(f"{mapped} (user {self._user!r})") from None
            raise mapped from None
        return str(response.token)
