"""Confine a user of etcd to one namespace, or to one role in it: roles, permissions, user.

Doing it again changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc

from omni_discovery.errors import RegistryUnavailableError
from omni_discovery.etcd._rpc import rpc, stubs
from omni_discovery.etcd.auth import Tokens
from omni_discovery.etcd.channel import EndpointChannel
from omni_discovery.etcd.config import RegistrySecurity
from omni_discovery.etcd.watch import prefix_end
from omni_discovery.records.roles import Access, access_of, access_of_all

__all__ = ["NamespaceAccess", "grant_namespace", "grant_roles", "role_of"]

_TIMEOUT_S: Final = 5.0
#: etcd's numbers for what a permission permits.
_READ: Final = 0
_READ_AND_WRITE: Final = 2


@dataclass(frozen=True, slots=True)
class NamespaceAccess:
    """The result of a grant. ``user_is_new`` is false if the user existed: its password was not changed."""

    roles: tuple[str, ...]
    user_is_new: bool
    #: Whether etcd has authentication enabled; without it, the role restricts no client.
    auth_is_on: bool


def role_of(namespace: str, role: str = "") -> str:
    """The name of a role of a namespace, or of that with all rights in it; also of the user where none is named."""
    # No namespace has a slash in its name, so that no role of one is a role of another.
    return f"omni-{namespace}/{role}" if role else f"omni-{namespace}"


async def grant_namespace(
    endpoints: Sequence[str], security: RegistrySecurity, namespace: str, user: str, password: str
) -> NamespaceAccess:
    """Give ``user`` a role that may read, write and watch the keys of the namespace, and no other keys.

    ``security`` is that of an administrator, where authentication is enabled. Doing it again changes nothing but an
    existing user's password, which stays. Raise RegistryError.
    """
    roles = {role_of(namespace): access_of_all(namespace)}
    return await _grant(endpoints, security, roles, user, password)


async def grant_roles(
    endpoints: Sequence[str],
    security: RegistrySecurity,
    namespace: str,
    roles: Sequence[str],
    user: str,
    password: str,
) -> NamespaceAccess:
    """Give ``user`` some of the roles of ``records.roles`` in the namespace. Else as ``grant_namespace``."""
    named = {role_of(namespace, role): access_of(namespace, role) for role in roles}
    return await _grant(endpoints, security, named, user, password)


async def _grant(
    endpoints: Sequence[str],
    security: RegistrySecurity,
    roles: Mapping[str, Sequence[Access]],
    user: str,
    password: str,
) -> NamespaceAccess:
    *others, last = endpoints
    for endpoint in others:
        try:
            return await _grant_at(endpoint, security, roles, user, password)
        except RegistryUnavailableError:
            continue
    return await _grant_at(last, security, roles, user, password)


async def _grant_at(
    endpoint: str, security: RegistrySecurity, roles: Mapping[str, Sequence[Access]], user: str, password: str
) -> NamespaceAccess:
    channel = EndpointChannel(endpoint, _TIMEOUT_S, security.tls)
    try:
        calls = _Calls(channel, Tokens(security.user, security.password, _TIMEOUT_S))
        for role, accesses in roles.items():
            await calls.make("RoleAdd", rpc.AuthRoleAddRequest(name=role), unless="role name already exists")
            for access in accesses:
                request = rpc.AuthRoleGrantPermissionRequest(name=role, perm=_permission(access))
                await calls.make("RoleGrantPermission", request)
        user_is_new = await calls.make(
            "UserAdd", rpc.AuthUserAddRequest(name=user, password=password), unless="user name already exists"
        )
        for role in roles:
            await calls.make("UserGrantRole", rpc.AuthUserGrantRoleRequest(user=user, role=role))
        return NamespaceAccess(tuple(roles), user_is_new, await calls.auth_is_on())
    finally:
        await channel.close()


def _permission(access: Access) -> Any:
    key = access.key.encode()
    # The generated messages keep this one in a module of its own.
    permission = sys.modules[f"{stubs.__package__}.auth_pb2"].Permission
    kind = _READ_AND_WRITE if access.writes else _READ
    return permission(permType=kind, key=key, range_end=prefix_end(key) if access.is_prefix else b"")


class _Calls:
    """Calls of etcd's Auth service as an administrator."""

    def __init__(self, channel: EndpointChannel, tokens: Tokens) -> None:
        self._channel = channel
        self._tokens = tokens
        self._service = channel.auth

    async def make(self, name: str, request: Any, *, unless: str = "") -> bool:
        """Call method ``name``; return False if etcd answers ``unless``: it was done before. Raise RegistryError."""
        metadata = await self._tokens.metadata(self._channel)
        try:
            await getattr(self._service, name)(request, timeout=_TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            if unless and unless in (error.details() or ""):
                return False
            raise self._channel.explain(error) from error
        return True

    async def auth_is_on(self) -> bool:
        """Whether authentication is enabled, by etcd's answer to a login that can't succeed."""
        try:
            await self._service.Authenticate(rpc.AuthenticateRequest(name="-"), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            return "authentication is not enabled" not in (error.details() or "")
        return True
