"""EndpointChannels: one gRPC channel per etcd endpoint, and failover between them.

After a failure, calls go to the next endpoint. The channel of the failed one stays open and reconnects by itself:
closing it would break other calls on it. ``Outage`` logs once that no endpoint answers and once that one does again, so
that the users of a connection need not.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import quote

import grpc
import grpc.aio

from omni_discovery.errors import RegistryError, RegistryUnavailableError
from omni_discovery.etcd._rpc import stubs
from omni_discovery.etcd.config import RegistryTls, socket_path
from omni_discovery.etcd.errors import map_error

logger = logging.getLogger(__name__)

#: Metadata of streams: a member without a leader must end them with an error instead of staying silent.
HAS_LEADER: Final = (("hasleader", "true"),)

_MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
_DRAIN_S: Final = 0.1


def channel_options(connect_timeout_s: float) -> list[tuple[str, int]]:
    """Options of gRPC: keepalive pings that detect a dead or hung server, at a rate that servers accept."""
    return [
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 3_000),
        # grpcio waits a minute for the answer to a ping unless this is set.
        ("grpc.http2.ping_timeout_ms", 3_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", int(connect_timeout_s * 1000)),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.enable_http_proxy", 0),
        # Clients of one process would share a connection, and a busy watch would delay another's renewals.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def was_cancelled() -> bool:
    """Whether a CancelledError that was just caught is a cancellation of this task.

    grpc.aio also ends a call by CancelledError when the channel is closed under it.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def closed_under(action: str) -> RegistryUnavailableError:
    """The error of a call whose channel was closed under it; ``action`` names the call."""
    return RegistryUnavailableError(f"{action}: the connection was closed", may_have_run=True)


def _channel(endpoint: str, tls: RegistryTls | None, options: list[tuple[str, Any]]) -> grpc.aio.Channel:
    if path := socket_path(endpoint):
        # gRPC reads it as a URL.
        return grpc.aio.insecure_channel(f"unix://{quote(path)}", options=options)
    if tls is None:
        return grpc.aio.insecure_channel(endpoint, options=options)
    if tls.server_name:
        options = [*options, ("grpc.ssl_target_name_override", tls.server_name)]
    credentials = grpc.ssl_channel_credentials(*tls.read())
    return grpc.aio.secure_channel(endpoint, credentials, options=options)


class EndpointChannel:
    """The gRPC channel to one endpoint, as parse_endpoints returns it, with its stubs."""

    def __init__(self, endpoint: str, connect_timeout_s: float, tls: RegistryTls | None = None) -> None:
        self.endpoint = endpoint
        self._tls = tls
        self._channel = _channel(endpoint, tls, channel_options(connect_timeout_s))
        self.kv: Any = stubs.KVStub(self._channel)
        self.lease: Any = stubs.LeaseStub(self._channel)
        self.watch: Any = stubs.WatchStub(self._channel)
        self.auth: Any = stubs.AuthStub(self._channel)
        self.maintenance: Any = stubs.MaintenanceStub(self._channel)

    def explain(self, error: grpc.RpcError) -> RegistryError:
        """Map the error of a call on this channel to one of errors.py."""
        return map_error(error, self.endpoint, self._tls)

    async def close(self) -> None:
        """Close the channel; calls under way are cancelled."""
        await self._channel.close(grace=None)


class EndpointChannels:
    """The channels to all endpoints. All calls use the current one until it fails, then the next."""

    def __init__(self, endpoints: Sequence[str], connect_timeout_s: float, tls: RegistryTls | None = None) -> None:
        # Clients start at random endpoints, so that the members share the load.
        shift = random.randrange(len(endpoints))
        ordered = [*endpoints[shift:], *endpoints[:shift]]
        self._channels = tuple(EndpointChannel(endpoint, connect_timeout_s, tls) for endpoint in ordered)
        self._current = 0

    def __len__(self) -> int:
        return len(self._channels)

    @property
    def current(self) -> EndpointChannel:
        """The channel to use now."""
        return self._channels[self._current]

    def leave_endpoint(self, channel: EndpointChannel) -> None:
        """A call on ``channel`` failed: use the next endpoint, unless another failed call has moved on already."""
        if self.current is channel:
            self._current = (self._current + 1) % len(self._channels)

    async def close(self) -> None:
        """Close all channels."""
        for channel in self._channels:
            await channel.close()
        # Cancelled calls still report through a thread of gRPC, which needs this loop: were it closed by then, the
        # events of other loops in this process would be delayed.
        await asyncio.sleep(_DRAIN_S)


class Outage:
    """Logs the outages of one connection. A call has failed if no endpoint answered any attempt of it."""

    def __init__(self, endpoints: Sequence[str], now: Callable[[], float] = time.monotonic) -> None:
        self._endpoints = ",".join(endpoints)
        self._now = now
        #: Since when no call was answered, monotonic seconds; None while calls are answered.
        self._since_s: float | None = None

    def call_failed(self, reason: object) -> None:
        """No endpoint answered a call, because of ``reason``."""
        if self._since_s is None:
            self._since_s = self._now()
            logger.warning("etcd.away endpoints=%s reason=%s", self._endpoints, reason)

    def call_answered(self) -> None:
        """An endpoint answered a call."""
        if self._since_s is not None:
            after_s, self._since_s = self._now() - self._since_s, None
            logger.info("etcd.back endpoints=%s after_s=%.1f", self._endpoints, after_s)
