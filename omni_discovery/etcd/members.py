"""The members of an etcd cluster, each asked for itself whether it answers and has a leader."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from omni_discovery.etcd import fork  # noqa: F401

# isort: split
import grpc

from omni_discovery.errors import ConfigError, RegistryError
from omni_discovery.etcd._rpc import rpc
from omni_discovery.etcd.channel import EndpointChannel
from omni_discovery.etcd.config import parse_endpoints

if TYPE_CHECKING:
    from omni_discovery.etcd.config import RegistrySecurity


@dataclass(frozen=True, slots=True)
class EtcdMember:
    """What one endpoint has answered; ``error`` is empty if it did.

    ``has_leader``: None where the member says that to administrators only.
    """

    endpoint: str
    error: str = ""
    has_leader: bool | None = None


#: gRPC's texts for an endpoint that is away, and what they mean for people. The first match counts.
_AWAY: Final = (
    ("Connection refused", "nobody listens there"),
    ("No such file or directory", "there is no such socket"),
    ("before receiving SETTINGS", "it takes connections and says nothing, as a stopped process does"),
    ("DEADLINE_EXCEEDED", "it takes connections and says nothing, as a stopped process does"),
    ("No route to host", "no way leads there"),
    ("Network is unreachable", "no way leads there"),
    ("connection attempt timed out", "no answer from that host"),
)


def _brief(text: str, endpoint: str) -> str:
    """What an error says, in a few words where it is one of those that are usual."""
    usual = next((meaning for sign, meaning in _AWAY if sign in text), "")
    return usual or text.removeprefix(f"{endpoint}: ")


async def ask_members(
    endpoints: str | Sequence[str], security: RegistrySecurity, timeout_s: float
) -> tuple[EtcdMember, ...]:
    """Ask all endpoints at the same time, each for ``timeout_s``; never raises RegistryError."""
    secured = security.for_endpoints(endpoints)
    parsed = parse_endpoints(endpoints)
    return tuple(await asyncio.gather(*(_ask(endpoint, secured, timeout_s) for endpoint in parsed)))


async def _ask(endpoint: str, security: RegistrySecurity, timeout_s: float) -> EtcdMember:
    try:
        channel = EndpointChannel(endpoint, timeout_s, security.tls)
    except (ConfigError, RegistryError) as error:
        return EtcdMember(endpoint, str(error))
    try:
        answer = await channel.maintenance.Status(rpc.StatusRequest(), timeout=timeout_s)
    except grpc.RpcError as error:
        if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
            return EtcdMember(endpoint)
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT and "user name" in (error.details() or ""):
            return EtcdMember(endpoint)
        return EtcdMember(endpoint, _brief(str(channel.explain(error)), endpoint))
    finally:
        await channel.close()
    return EtcdMember(endpoint, has_leader=bool(answer.leader))
