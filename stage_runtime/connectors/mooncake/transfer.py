"""Hand-offs moved by Mooncake's transfer engine, over TCP or RDMA, from one registered pool into another."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import ssl
import sys
import threading
import uuid
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from omni_discovery.errors import ConfigError
from omni_discovery.log_once import LogOnce
from stage_runtime.connectors.base import current_producer
from stage_runtime.connectors.errors import TransferError
from stage_runtime.connectors.mooncake.engine import (
    EngineEnd,
    ProducerReads,
    check_devices,
    check_host,
    check_protocol,
    host_of,
)
from stage_runtime.connectors.mooncake.offers import FetchRequest, OfferServer, receive_offered
from stage_runtime.connectors.settings import COMMON, flag, limits_of, number, port
from stage_runtime.connectors.store.connector import StoringConnector, edge_of
from stage_runtime.connectors.store.layout import TOKEN_BYTES, key_digest
from stage_runtime.connectors.store.memory import Loan
from stage_runtime.connectors.store.registered import (
    BufferAllocator,
    ManagedBlockPool,
    ManagedBuffer,
    PoolBlock,
    flat_tensor,
)
from stage_runtime.connectors.store.store import Kept, Store
from stage_runtime.connectors.tcp.client import converse
from stage_runtime.connectors.tcp.connector import TCP_SETTINGS, TcpEnd
from stage_runtime.connectors.tcp.server import PayloadServer

logger = logging.getLogger(__name__)

_POOL_BYTES: Final = 1 << 30
#: How many ports from ``zmq_port`` on are tried: replicas of one document share a host.
_PORTS_TRIED: Final = 64
#: What both sides show in place of a sender's token with ``insecure_by_key``: no secret.
_OPEN_TOKEN: Final = hashlib.blake2b(b"insecure_by_key", digest_size=TOKEN_BYTES).digest()
_ROLES: Final = ("both", "sender", "receiver")
_SETTINGS: Final = frozenset(
    {
        "device_name",
        "host",
        "insecure_by_key",
        "memory_pool_device",
        "memory_pool_size",
        "protocol",
        "role",
        "sender_host",
        "sender_token",
        "sender_zmq_port",
        "zmq_port",
    }
)


class _OfferEnd(TcpEnd):
    """Control connections of both sides; the hand-offs themselves are moved by the engine."""

    def __init__(self, config: dict[str, Any], store: Store, engine: EngineEnd, sender_token: bytes) -> None:
        super().__init__(config, store)
        self._engine = engine
        self._sender_token = sender_token
        self._port = port(config, "zmq_port")
        self._reads = ProducerReads()

    def _make_server(self, tls: ssl.SSLContext | None) -> PayloadServer:
        session = self._engine.start()
        # The port of a server that has died is taken again: the replica's record names it.
        if self._server is not None and (again := self._listen_on(self._server.port, tls, session)) is not None:
            return again
        end = min(self._port + _PORTS_TRIED, 65536) if self._port else 0
        for wanted in range(self._port, end):
            server = self._listen_on(wanted, tls, session)
            if server is not None:
                if wanted != self._port:
                    logger.warning("connector.port_taken zmq_port=%d listens_on=%d", self._port, wanted)
                return server
        return self._new_server(0, tls, session)

    def _listen_on(self, wanted: int, tls: ssl.SSLContext | None, session: str) -> OfferServer | None:
        """A server on that port; None if somebody else listens there."""
        try:
            return self._new_server(wanted, tls, session)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return None

    def _new_server(self, wanted: int, tls: ssl.SSLContext | None, session: str) -> OfferServer:
        return OfferServer(self._bind_host, self._store, tls, self._limits, wanted, session, self._sender_token)

    @property
    def cut_off(self) -> bool:
        """Whether a consumer was reading from the pool when the server was closed."""
        return isinstance(self._server, OfferServer) and self._server.cut_off

    def fetch_managed(
        self, key: str, address: tuple[str, int], shown: tuple[bytes, bytes], metadata: dict[str, Any]
    ) -> tuple[ManagedBuffer, bool] | None:
        """Fetch a hand-off into the pool, and whether it is raw; None if it was dropped. Raise TransferError.

        ``shown`` are its generation and token, or the digest of its key and the sender's token.
        """
        producer = current_producer() or f"{address[0]} port {address[1]}"
        self._reads.check_producer(producer)
        deadline_s = self._deadline_s(metadata)
        pool = self._engine.pool
        announced = metadata.get("data_size")
        if isinstance(announced, int):
            self._check_size(announced)
        asked = FetchRequest(
            *shown,
            bool(metadata.get("consume", True)),
            announced if isinstance(announced, int) else None,
            "" if _address(metadata) is None else address[0],
            producer,
        )
        with self._fetches.under_way(key) as fetching:
            taken = converse(
                address,
                fetching,
                deadline_s,
                None if self._tls is None else self._tls.client,
                lambda on: receive_offered(on, fetching, asked, deadline_s, pool, self._engine.read, self._reads),
            )
        if taken is None:
            return None
        block, size_bytes, is_raw = taken
        return ManagedBuffer(pool, block, size_bytes), is_raw


@dataclass(frozen=True, slots=True)
class _Sender:
    address: tuple[str, int] | None
    token: bytes


class MooncakeTransferEngineConnector(StoringConnector):
    """Bytes, tensors and buffers of the pool are sent raw and come as ManagedBuffer; other objects are serialized.

    A hand-off is read by any number of consumers at once, from the producer's pool into theirs. The metadata of ``put``
    is all that a consumer needs. Without metadata, or with only ``source_host`` and ``source_port``, a consumer fetches
    a hand-off by its key, which takes the sender's token: see ``update_sender_info``. With ``insecure_by_key`` on both
    sides it takes none.
    """

    supports_raw_data = True
    known_settings = COMMON | TCP_SETTINGS | _SETTINGS
    _usual: ClassVar[dict[str, str]] = {"protocol": "tcp", "device_name": "", "memory_pool_device": "cpu"}
    _check_host = staticmethod(check_host)
    _check_protocol = staticmethod(check_protocol)

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        given = dict(config or {})
        if host := host_of(given):
            given["advertise_host"] = host
        usual = self._usual
        self.host = self._check_host(str(given.get("advertise_host", "")))
        self.protocol = self._check_protocol(given.get("protocol", usual["protocol"]))
        self.device_name = str(given.get("device_name", usual["device_name"]))
        check_devices(self.protocol, self.device_name)
        self.pool_size = int(number(given, "memory_pool_size", _POOL_BYTES, 1 << 16))
        self.pool_device = str(given.get("memory_pool_device", usual["memory_pool_device"]))
        self.role = given.get("role", "both")
        if self.role not in _ROLES:
            raise ConfigError(f"role is {self.role!r}; one of {', '.join(_ROLES)} is wanted")
        self.can_put = self.role != "receiver"
        self._engine = self._make_engine(given)
        super().__init__(given)
        #: The token that the settings say: senders require it, and receivers show it.
        self._token_given = self._token_of(given)
        self._sender_token = self._token_given or os.urandom(TOKEN_BYTES)
        #: Senders by rank; None is the default.
        self._senders: dict[int | None, _Sender] = {}
        self._senders_lock = threading.Lock()
        self._no_token_told = LogOnce()
        self._offers = _OfferEnd(self.config, self._store, self._engine, self._sender_token)
        #: Unique to this connector.
        self.engine_id = str(uuid.uuid4())
        sender_port = port(given, "sender_zmq_port")
        if given.get("sender_host") and sender_port:
            self.update_sender_info(str(given["sender_host"]), sender_port)

    def _token_of(self, given: dict[str, Any]) -> bytes:
        secret = str(given.get("sender_token", ""))
        if not flag(given, "insecure_by_key", False):
            return hashlib.blake2b(secret.encode(), digest_size=TOKEN_BYTES).digest() if secret else b""
        if secret:
            raise ConfigError("insecure_by_key is true beside a sender_token: keep one of the two, best the token")
        logger.warning("connector.insecure who reaches the port and knows a key may fetch: setting=insecure_by_key")
        return _OPEN_TOKEN

    def _make_engine(self, given: dict[str, Any]) -> EngineEnd:
        return EngineEnd(self.host, self.protocol, self.device_name, self.pool_size, self.pool_device)

    def _make_store(self) -> Store:
        self._memory = ManagedBlockPool(lambda: self._engine.pool)
        return Store(self.namespace, None, limits_of(self.config, None), in_memory=False, memory=self._memory)

    def _describe(self, kept: Kept) -> dict[str, Any]:
        assert isinstance(kept.block, PoolBlock)  # noqa: S101 - for the type checker
        return self._offers.offer(kept) | {"is_fast_path": kept.block.is_raw}

    @property
    def pool(self) -> Any:
        """The pool as a tensor of uint8. This property and the next three start the engine. Raise TransferError."""
        return self._engine.pool.tensor

    @property
    def base_ptr(self) -> int:
        """The address of the pool."""
        return self._engine.pool.address

    @property
    def rpc_port(self) -> int:
        """The port of the engine itself."""
        self._engine.start()
        return self._engine.rpc_port

    @property
    def zmq_port(self) -> int:
        """The port of the control connections."""
        return self._offers.listen()[1]

    @property
    def allocator(self) -> BufferAllocator:
        """Which parts of the pool are free. ``allocate`` takes one with all that belongs to it."""
        return self._engine.pool.allocator

    @property
    def engine(self) -> Any:
        """The library's engine, started. Raise TransferError if it does not start."""
        return self._engine.library_engine

    @property
    def sender_host(self) -> str | None:
        """The host of the sender that is asked by key; None while none is known."""
        address = self._default_sender()
        return None if address is None else address[0]

    @property
    def sender_zmq_port(self) -> int | None:
        """The port of the sender that is asked by key; None while none is known."""
        address = self._default_sender()
        return None if address is None else address[1]

    def _default_sender(self) -> tuple[str, int] | None:
        with self._senders_lock:
            known = self._senders.get(None)
        return None if known is None else known.address

    @property
    def zmq_ctx(self) -> Any:
        """The ZMQ context of the process, for the caller's own sockets: the control connections here are plain TCP."""
        import zmq

        return zmq.Context.instance()

    def allocate(self, size_bytes: int) -> ManagedBuffer:
        """A buffer of the pool, to be filled and given to ``put``, which does not copy it. Raise OSError if full."""
        pool = self._engine.pool
        return ManagedBuffer(pool, pool.allocate(size_bytes), size_bytes)

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        """See OmniConnectorBase. A ManagedBuffer is not copied but held: the caller may release it, not change it."""
        if not self.can_put:
            return self._failed(from_stage, to_stage, TransferError("the role of this connector is receiver"))
        raw = _raw(data)
        if raw is None:
            return super().put(from_stage, to_stage, put_key, data)
        piece: PoolBlock | None = None
        try:
            piece, size_bytes = self._piece(raw)
            metadata = self._described(self._store.put(edge_of(from_stage, to_stage, put_key), (), size_bytes, piece))
        except (OSError, ConfigError, ValueError) as error:
            if piece is not None:
                piece.drop()
            return self._failed(from_stage, to_stage, error)
        with self._lock:
            self._puts += 1
        return True, size_bytes, metadata

    def _piece(self, raw: Any) -> tuple[PoolBlock, int]:
        pool = self._engine.pool
        if isinstance(raw, ManagedBuffer) and raw.pool is pool:
            return PoolBlock(pool, raw.retain().hand_on(), is_raw=True), raw.size
        tensor = raw.tensor if isinstance(raw, ManagedBuffer) else raw
        size_bytes = len(tensor)
        piece = PoolBlock(pool, pool.allocate(size_bytes), is_raw=True)
        pool.slice(piece.block, size_bytes).copy_(tensor)
        return piece, size_bytes

    def _fetch(self, edge: tuple[str, str, str], metadata: dict[str, Any]) -> tuple[Loan, Any] | None:
        where = self._where(edge, metadata)
        found = None if where is None else self._offers.fetch_managed(edge[2], *where, metadata)
        if found is None:
            return None
        buffer, is_raw = found
        if is_raw:
            return buffer, buffer
        array = buffer.pool.view(buffer.hand_on(), buffer.size)
        return array, array.payload()

    def _open(self, content: Any) -> Any:
        return content if isinstance(content, ManagedBuffer) else super()._open(content)

    def _where(
        self, edge: tuple[str, str, str], metadata: dict[str, Any]
    ) -> tuple[tuple[str, int], tuple[bytes, bytes]] | None:
        """The sender to ask, and what to show there; None if the sender or its token is not known."""
        address = _address(metadata)
        generation, token = metadata.get("generation"), metadata.get("token")
        if address and isinstance(generation, bytes) and isinstance(token, bytes):
            return address, (generation, token)
        rank = metadata.get("sender_rank")
        with self._senders_lock:
            known = self._senders.get(rank if isinstance(rank, int) else None)
        known = known or _Sender(None, b"")
        address = address or known.address
        shown = metadata.get("sender_token") or known.token or self._token_given
        if not address:
            return None
        if not isinstance(shown, bytes) or not shown:
            self._tell_no_token(address)
            return None
        return address, (key_digest(self.namespace, *edge), shown)

    def _tell_no_token(self, address: tuple[str, int]) -> None:
        with self._lock:
            is_news = self._no_token_told.should(address)
        if is_news:
            logger.warning(
                "connector.no_sender_token host=%s zmq_port=%d: give its sender_token to update_sender_info, or both "
                "sides the same one in their settings",
                *address,
            )

    def update_sender_info(
        self, sender_host: str, sender_zmq_port: int, sender_rank: int | None = None, sender_token: bytes = b""
    ) -> None:
        """Set where a sender is, and its token, from the sender's ``get_connection_info``.

        Without a rank, it is the sender of hand-offs without metadata; with one, of those with that ``sender_rank``.
        Raise ConfigError for a host or a port that can't be one.
        """
        if type(sender_host) is not str or not sender_host:
            raise ConfigError(f"sender_host is {sender_host!r}; the sender's address is wanted")
        if type(sender_zmq_port) is not int or not 0 < sender_zmq_port < 65536:
            raise ConfigError(f"sender_zmq_port is {sender_zmq_port!r}; the sender's port is wanted, from 1 to 65535")
        with self._senders_lock:
            self._senders[sender_rank] = _Sender((sender_host, sender_zmq_port), sender_token)

    def get_connection_info(self) -> dict[str, Any]:
        """The address and secret token for a receiver's fetch by key. Raise OSError if the port can't be bound."""
        return {**self.endpoint(), "sender_token": self._sender_token}

    def endpoint(self) -> dict[str, Any]:
        """See OmniConnectorBase."""
        host, port = self._offers.listen()
        return {"host": host, "zmq_port": port, "session": self._engine.start(), "protocol": self.protocol}

    def cancel(self, get_key: str) -> None:
        """See OmniConnectorBase."""
        self._offers.cancel(get_key)

    def health(self) -> dict[str, Any]:
        """See OmniConnectorBase. Starts the engine, which would take too long for the first fetch."""
        counts = super().health() | self._offers.counts()
        counts |= {"protocol": self.protocol, "pool_size": self.pool_size, "pool_free_bytes": self._free_bytes()}
        try:
            self._engine.start()
        except OSError as error:
            return counts | {"status": "unhealthy", "reason": str(error)}
        return counts

    def _free_bytes(self) -> int:
        self._memory.trim()
        return self._engine.free_bytes

    def close(self) -> None:
        """See OmniConnectorBase."""
        self._offers.close()
        super().close()
        self._engine.close(is_read=self._offers.cut_off)


def _address(metadata: dict[str, Any]) -> tuple[str, int] | None:
    host, port = metadata.get("source_host"), metadata.get("source_port")
    return (host, port) if isinstance(host, str) and isinstance(port, int) else None


def _raw(data: Any) -> Any:
    """The data to send raw, a ManagedBuffer or a flat tensor of uint8; None for data to be serialized."""
    if isinstance(data, ManagedBuffer):
        return data
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(data, torch.Tensor) and data.layout is torch.strided and not data.is_quantized:
        return data.detach().contiguous().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    if isinstance(data, bytes | bytearray | memoryview):
        return flat_tensor(data)
    return None
