"""Hand-offs moved by Mooncake's transfer engine, over TCP or RDMA, from one registered pool into another."""

from __future__ import annotations

import hashlib
import os
import ssl
import sys
import threading
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from omni_discovery.errors import ConfigError
from stage_runtime.connectors.errors import TransferError
from stage_runtime.connectors.mooncake.engine import EngineEnd, check_devices, check_host, check_protocol
from stage_runtime.connectors.mooncake.offers import FetchRequest, OfferServer, receive_offered
from stage_runtime.connectors.settings import COMMON, limits_of, number
from stage_runtime.connectors.store.connector import StoringConnector
from stage_runtime.connectors.store.layout import TOKEN_BYTES, key_digest
from stage_runtime.connectors.store.memory import Loan
from stage_runtime.connectors.store.registered import ManagedBlockPool, ManagedBuffer, PoolBlock, flat_tensor
from stage_runtime.connectors.store.store import Kept, Store
from stage_runtime.connectors.tcp.client import converse
from stage_runtime.connectors.tcp.connector import TCP_SETTINGS, TcpEnd
from stage_runtime.connectors.tcp.server import PayloadServer

_POOL_BYTES: Final = 1 << 30
_ROLES: Final = ("both", "sender", "receiver")
_SETTINGS: Final = frozenset(
    {
        "device_name",
        "host",
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
        self._port = int(number(config, "zmq_port", 0))

    def _make_server(self, tls: ssl.SSLContext | None) -> PayloadServer:
        session = self._engine.start()
        return OfferServer(self._bind_host, self._store, tls, self._limits, self._port, session, self._sender_token)

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
        deadline_s = self._deadline_s(metadata)
        pool = self._engine.pool
        announced = metadata.get("data_size")
        asked = FetchRequest(
            *shown, bool(metadata.get("consume", True)), announced if isinstance(announced, int) else None
        )
        with self._fetches.under_way(key) as fetching:
            taken = converse(
                address,
                fetching,
                deadline_s,
                None if self._tls is None else self._tls.client,
                lambda connection: receive_offered(connection, fetching, asked, deadline_s, pool, self._engine.read),
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
    a hand-off by its key, which takes the sender's token: see ``update_sender_info``.
    """

    supports_raw_data = True
    known_settings = COMMON | TCP_SETTINGS | _SETTINGS
    _usual: ClassVar[dict[str, str]] = {"protocol": "tcp", "device_name": "", "memory_pool_device": "cpu"}
    _check_host = staticmethod(check_host)
    _check_protocol = staticmethod(check_protocol)

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        given = dict(config or {})
        host = given.get("host")
        if host and host != "auto":
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
        secret = str(given.get("sender_token", ""))
        #: The token made of a configured secret: senders require it, and receivers show it.
        self._token_given = hashlib.blake2b(secret.encode(), digest_size=TOKEN_BYTES).digest() if secret else b""
        self._sender_token = self._token_given or os.urandom(TOKEN_BYTES)
        #: Senders by rank; None is the default.
        self._senders: dict[int | None, _Sender] = {}
        self._senders_lock = threading.Lock()
        self._offers = _OfferEnd(self.config, self._store, self._engine, self._sender_token)
        sender_port = int(number(given, "sender_zmq_port", 0))
        if given.get("sender_host") and sender_port:
            self.update_sender_info(str(given["sender_host"]), sender_port)

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
            metadata = self._described(self._store.put((from_stage, to_stage, put_key), (), size_bytes, piece))
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
        if not address or not isinstance(shown, bytes) or not shown:
            return None
        return address, (key_digest(self.namespace, *edge), shown)

    def update_sender_info(
        self, sender_host: str, sender_zmq_port: int, sender_rank: int | None = None, sender_token: bytes = b""
    ) -> None:
        """Set where a sender is, and its token, from the sender's ``get_connection_info``.

        Without a rank, it is the sender of hand-offs without metadata; with one, of those with that ``sender_rank``.
        """
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
