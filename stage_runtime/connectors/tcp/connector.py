"""Hand-offs over plain sockets between stages of different hosts, with TLS if wanted; nothing to install.

With TLS, both sides show a certificate of the same authority. Names in certificates are not checked: hosts come and go,
and no authority but this deployment's is trusted.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from omni_discovery.errors import ConfigError
from stage_runtime.connectors.base import current_producer
from stage_runtime.connectors.errors import TransferCancelledError, TransferError
from stage_runtime.connectors.producer_room import ProducerRoom
from stage_runtime.connectors.settings import COMMON, limits_of, number
from stage_runtime.connectors.store.connector import StoringConnector
from stage_runtime.connectors.store.memory import Loan, PooledBuffer, ReceivePool
from stage_runtime.connectors.store.store import Kept, Store
from stage_runtime.connectors.tcp.client import Fetches, PayloadAddress, fetch
from stage_runtime.connectors.tcp.server import PayloadServer, ServerLimits


@dataclass(frozen=True, slots=True)
class Tls:
    """The contexts of both sides."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def load_tls(settings: Any) -> Tls | None:
    """The contexts from the paths ``cert``, ``key`` and ``ca``; None without settings. Raise ConfigError."""
    if not settings:
        return None
    if not isinstance(settings, Mapping) or set(settings) != {"cert", "key", "ca"}:
        raise ConfigError(f"tls needs exactly the paths 'cert', 'key' and 'ca', not {settings!r}")
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(settings["cert"], settings["key"])
            context.load_verify_locations(settings["ca"])
        except (OSError, TypeError) as error:
            raise ConfigError(f"tls: {error}") from error
    return Tls(server, client)


TCP_SETTINGS: Final = frozenset(
    {
        "advertise_host",
        "bind_host",
        "max_connections",
        "max_fetch_bytes",
        "request_timeout_s",
        "stall_timeout_s",
        "timeout_s",
        "tls",
    }
)
_TIMEOUT_S: Final = 30.0
_LOOPBACK: Final = "127.0.0.1"


class TcpEnd:
    """Both sides of TCP for a connector: fetches, and a server that starts with the first hand-off to offer."""

    def __init__(self, config: dict[str, Any], store: Store) -> None:
        self._store = store
        self._advertise_host = str(config.get("advertise_host", "")).strip("[]")
        self._bind_host = str(config.get("bind_host", "")).strip("[]")
        if not self._bind_host:
            # An address to advertise may be one that this machine does not have itself, behind NAT for example.
            everywhere = "::" if ":" in self._advertise_host else "0.0.0.0"  # noqa: S104
            self._bind_host = everywhere if self._advertise_host else _LOOPBACK
        self._advertise_host = self._advertise_host or _LOOPBACK
        self._timeout_s = number(config, "timeout_s", _TIMEOUT_S)
        self._tls = load_tls(config.get("tls"))
        usual = ServerLimits()
        self._limits = replace(
            usual,
            max_connections=int(number(config, "max_connections", usual.max_connections, 1)),
            request_timeout_s=number(config, "request_timeout_s", usual.request_timeout_s),
            stall_timeout_s=number(config, "stall_timeout_s", usual.stall_timeout_s),
        )
        usual_bytes = limits_of(config, None)
        self._max_fetch_bytes = int(number(config, "max_fetch_bytes", usual_bytes.max_inflight_bytes, 1))
        self._memory = ReceivePool(usual_bytes.pool_bytes)
        self._fetches = Fetches()
        self._room = ProducerRoom()
        self._lock = threading.Lock()
        self._server: PayloadServer | None = None
        self._closed = False

    def offer(self, kept: Kept) -> dict[str, Any]:
        """The metadata by which consumers fetch a stored hand-off. Raise OSError if it can't listen."""
        host, port = self.listen()
        return {
            "source_host": host,
            "source_port": port,
            "data_size": kept.size_bytes,
            "generation": kept.generation,
            "token": kept.token,
            "tls": self._tls is not None,
        }

    def listen(self) -> tuple[str, int]:
        """Host and port of this producer, which listens from now on. Raise OSError if it can't.

        Raise TransferCancelledError after ``close``.
        """
        with self._lock:
            if self._closed:
                raise TransferCancelledError("the connector is closed")
            if self._server is not None and not self._server.alive:
                self._server.close()
            if self._server is None or not self._server.alive:
                self._server = self._make_server(None if self._tls is None else self._tls.server)
            return self._advertise_host, self._server.port

    def endpoint(self) -> dict[str, Any]:
        """Host and port of this producer for its replica's record; hubs refuse hand-offs that name another address."""
        host, port = self.listen()
        return {"host": host, "port": port}

    def _make_server(self, tls: ssl.SSLContext | None) -> PayloadServer:
        # The port of a server that has died is taken again: the replica's record names it.
        port = 0 if self._server is None else self._server.port
        return PayloadServer(self._bind_host, self._store, tls, self._limits, port)

    def fetch(self, key: str, metadata: dict[str, Any]) -> PooledBuffer | None:
        """Fetch the hand-off that the metadata describe; None if they describe none, or it was dropped.

        Raise TransferError.
        """
        source = source_of(metadata)
        if source is None:
            return None
        self._check_tls(metadata)
        self._check_size(source.size_bytes)
        producer = current_producer() or f"{source.host} port {source.port}"
        deadline_s, size_bytes = self._deadline_s(metadata), source.size_bytes
        with self._fetches.under_way(key) as fetching:
            # Several hand-offs of one producer at once take no more memory than one may.
            self._room.take(producer, size_bytes, self._max_fetch_bytes, deadline_s, fetching.check)
            try:
                return fetch(
                    source,
                    fetching,
                    deadline_s,
                    consume=bool(metadata.get("consume", True)),
                    tls=None if self._tls is None else self._tls.client,
                    memory=self._memory.take_buffer,
                )
            finally:
                self._room.give_back(producer, size_bytes)

    def _check_tls(self, metadata: dict[str, Any]) -> None:
        if bool(metadata.get("tls")) != (self._tls is not None):
            raise TransferError("one side of the edge has TLS and the other has not")

    def _check_size(self, size_bytes: int) -> None:
        if not 0 <= size_bytes <= self._max_fetch_bytes:
            raise TransferError(f"{size_bytes} bytes are announced; max_fetch_bytes is {self._max_fetch_bytes}")

    def _deadline_s(self, metadata: dict[str, Any]) -> float:
        timeout_s = metadata.get("timeout_s", self._timeout_s)
        return time.monotonic() + (timeout_s if isinstance(timeout_s, int | float) else self._timeout_s)

    def cancel(self, key: str) -> None:
        """Cancel the fetches of a key."""
        self._fetches.cancel(key)

    def counts(self) -> dict[str, Any]:
        """The transfers by their end, for ``health``."""
        server = self._server
        return {
            "receive_free_bytes": self._memory.free_bytes,
            "transfers": {} if server is None else dict(server.counts),
        }

    def close(self) -> None:
        """End the transfers under way on both sides, and stop listening. Idempotent."""
        self._fetches.close()
        with self._lock:
            self._closed = True
            server = self._server
        if server is not None:
            server.close()
        self._memory.close()


def source_of(metadata: dict[str, Any]) -> PayloadAddress | None:
    """The address in the metadata of ``offer``; None if they are not complete."""
    wanted = {"source_host": str, "source_port": int, "generation": bytes, "token": bytes, "data_size": int}
    if any(not isinstance(metadata.get(name), kind) for name, kind in wanted.items()):
        return None
    return PayloadAddress(*(metadata[name] for name in wanted))


class TcpConnector(StoringConnector):
    """Hand-offs below ``shm_threshold_bytes`` travel inside the metadata; larger ones are fetched from their producer.

    Each needs a token of its own, which is in the metadata; without the metadata of ``put`` nothing is found.
    ``get`` consumes what it returns, unless the metadata says ``consume: False``.
    """

    known_settings = COMMON | TCP_SETTINGS
    can_find_by_key = False

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__(config)
        self._tcp = TcpEnd(self.config, self._store)

    def _make_store(self) -> Store:
        return Store(self.namespace, None, limits_of(self.config, None), in_memory=True)

    def _describe(self, kept: Kept) -> dict[str, Any]:
        return self._tcp.offer(kept)

    def endpoint(self) -> dict[str, Any]:
        """See OmniConnectorBase. Listens from now on."""
        return self._tcp.endpoint()

    def _fetch(self, edge: tuple[str, str, str], metadata: dict[str, Any]) -> tuple[Loan, memoryview] | None:
        buffer = self._tcp.fetch(edge[2], metadata)
        return None if buffer is None else (buffer, buffer.payload())

    def cancel(self, get_key: str) -> None:
        """See OmniConnectorBase."""
        self._tcp.cancel(get_key)

    def health(self) -> dict[str, Any]:
        """See OmniConnectorBase."""
        return {**super().health(), **self._tcp.counts()}

    def close(self) -> None:
        """See OmniConnectorBase."""
        self._tcp.close()
        super().close()
