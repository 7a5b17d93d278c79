"""Hand-offs in Yuanrong's datasystem, a store beside the stages, on one host or on many.

The name of a hand-off is made of the hash of namespace, edge and key, and of its generation; the value under the hash
alone is the present generation of the key. No value is overwritten, so a reader never sees two hand-offs mixed.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from omni_discovery.errors import ConfigError
from stage_runtime.connectors.errors import TransferCancelledError, TransferError
from stage_runtime.connectors.serialization import Buffer
from stage_runtime.connectors.settings import COMMON, limits_of, number
from stage_runtime.connectors.store.connector import StoringConnector
from stage_runtime.connectors.store.layout import GENERATION_BYTES, NAME_PREFIX, key_digest
from stage_runtime.connectors.store.memory import Loan, PooledBuffer, ReceivePool
from stage_runtime.connectors.store.store import Kept, Limits, Store
from stage_runtime.connectors.tcp.client import Fetch, Fetches
from stage_runtime.connectors.yuanrong.client import YuanrongClient, load_package

logger = logging.getLogger(__name__)

#: The shortest time between two checks of which hand-offs were consumed; without room, a producer checks at once.
_ASK_EVERY_S: Final = 1.0
#: How long a consumer's claim keeps other consumers away, in seconds.
CLAIM_S: Final = 60
_LONGEST_S: Final = 2**31 - 1


def whole_seconds(ttl_s: float) -> int:
    """A time to live in whole seconds, 1 at least: to the datasystem, 0 means for ever."""
    return math.ceil(min(max(ttl_s, 1), _LONGEST_S))


def key_name(digest: bytes) -> str:
    """The name of the value with a key's present generation."""
    return f"{NAME_PREFIX}{digest.hex()}"


def payload_name(digest: bytes, generation: bytes) -> str:
    """The name of a hand-off."""
    return f"{key_name(digest)}-{generation.hex()}"


def fetched_name(payload: str) -> str:
    """The name of the mark of a hand-off that was fetched."""
    return f"{payload}-fetched"


def claim_name(payload: str) -> str:
    """The name of the mark of a consumer that will consume a hand-off; only one can set it."""
    return f"{payload}-claimed"


class YuanrongBlock:
    """See MemoryBlock; one hand-off in the datasystem. ``fetched`` and ``consumed`` are as of the last check."""

    path: str | None = None
    name = ""

    def __init__(self, memory: YuanrongBlockPool) -> None:
        self._memory = memory
        self.pins = 0
        self.fetched = False
        self.consumed = False
        self.digest = b""
        self.generation = b""

    @property
    def payload(self) -> str:
        """The hand-off's name in the datasystem."""
        return payload_name(self.digest, self.generation)

    def fill(self, parts: Sequence[Buffer], size_bytes: int, generation: bytes, key_digest: bytes) -> None:
        """See MemoryBlock."""
        self.digest, self.generation = key_digest, generation
        self._memory.write(self, parts)

    def publish(self, path: str) -> None:
        """See MemoryBlock. Does nothing: it has no path."""

    def hide(self) -> bool:
        """See MemoryBlock. False: it is not fetched from its producer."""
        return False

    def note_fetched(self) -> None:
        """See MemoryBlock."""
        self.fetched = True

    def view(self, size_bytes: int) -> memoryview:
        """See MemoryBlock. Raise TransferError: it is not in this process."""
        raise TransferError("the hand-off is in the datasystem, not here")

    def drop(self) -> None:
        """See MemoryBlock."""
        self._memory.give_back(self)


class YuanrongBlockPool:
    """See BlockPool; the datasystem. A value that can't be dropped ends with its time to live there."""

    free_bytes = 0

    def __init__(self, client: YuanrongClient, ttl_s: float) -> None:
        self._client = client
        self._ttl_s = whole_seconds(ttl_s)
        self._lock = threading.Lock()
        self._pieces: dict[str, YuanrongBlock] = {}
        #: The present generation by the digest of its key.
        self._meant: dict[bytes, bytes] = {}
        self.made = 0

    def take_block(self, size_bytes: int) -> YuanrongBlock:
        """See BlockPool."""
        return YuanrongBlock(self)

    def write(self, piece: YuanrongBlock, parts: Sequence[Buffer]) -> None:
        """Store a hand-off, and its generation as the present one of its key. Raise TransferError."""
        with self._lock:
            self._pieces[piece.payload] = piece
            self.made = max(self.made, len(self._pieces))
        self._client.store([(piece.payload, parts), (key_name(piece.digest), [piece.generation])], self._ttl_s)
        with self._lock:
            self._meant[piece.digest] = piece.generation

    def give_back(self, segment: Any) -> None:
        """See BlockPool."""
        piece: YuanrongBlock = segment
        names = [piece.payload, fetched_name(piece.payload), claim_name(piece.payload)]
        with self._lock:
            if self._pieces.pop(piece.payload, None) is None:
                return
            if self._meant.get(piece.digest) == piece.generation:
                del self._meant[piece.digest]
                names.append(key_name(piece.digest))
        try:
            self._client.delete(names)
        except TransferCancelledError:
            return
        except TransferError as error:
            logger.warning("yuanrong.not_dropped ttl_s=%d reason=%s", self._ttl_s, error)

    def update_fetched(self) -> None:
        """Check which hand-offs were fetched and consumed. Changes nothing if the datasystem can't be reached."""
        with self._lock:
            pieces = [piece for piece in self._pieces.values() if not piece.consumed]
        if not pieces:
            return
        names = [name for piece in pieces for name in (piece.payload, fetched_name(piece.payload))]
        try:
            there = self._client.exist(names)
        except TransferError as error:
            logger.warning("yuanrong.not_asked reason=%s", error)
            return
        for piece, payload_there, fetched in zip(pieces, there[::2], there[1::2], strict=True):
            piece.consumed = not payload_there
            piece.fetched = fetched or piece.consumed

    def shrink(self) -> None:
        """See BlockPool."""

    def trim(self) -> None:
        """See BlockPool."""

    def close(self) -> None:
        """See BlockPool."""
        self._client.close()


class YuanrongStore(Store):
    """A Store that checks what was fetched and consumed before it drops hand-offs."""

    def __init__(
        self, namespace: str, client: YuanrongClient, limits: Limits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._memory = YuanrongBlockPool(client, limits.ttl_s)
        self._ask_at_s = clock() + _ASK_EVERY_S
        super().__init__(namespace, None, limits, in_memory=False, clock=clock, memory=self._memory)

    def tidy(self, look_at: int | None = None) -> None:
        """See Store. Without a number it checks the datasystem once in ``_ASK_EVERY_S`` at most."""
        now_s = self._clock()
        if look_at is not None or now_s >= self._ask_at_s:
            self._ask_at_s = now_s + _ASK_EVERY_S
            self._memory.update_fetched()
            look_at = len(self._kept)
        super().tidy(*() if look_at is None else (look_at,))


_HOST: Final = "127.0.0.1"
_PORT: Final = 35001
_GET_SUB_TIMEOUT_MS: Final = 1000
_REQUEST_TIMEOUT_S: Final = 2.0
_LOOK_EVERY_S: Final = 0.02


class YuanrongConnector(StoringConnector):
    """Hand-offs are in the datasystem; without ``by_key``, small ones travel inside the metadata.

    Their producer drops them there; those of a killed producer end with their time to live. ``get`` consumes what it
    returns, unless the metadata says ``consume: False``. With ``by_key`` the key is enough to find a hand-off: without
    the metadata of ``put``, ``get`` waits for it, ``get_sub_timeout_ms`` at most.
    """

    known_settings = COMMON | {
        "advertise_host",
        "bind_host",
        "get_sub_timeout_ms",
        "host",
        "port",
        "request_timeout_s",
    }

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__(config)
        self.get_sub_timeout_ms = max(0, int(number(self.config, "get_sub_timeout_ms", _GET_SUB_TIMEOUT_MS, -1)))
        self._memory = ReceivePool(self._limits.pool_bytes)
        self._fetches = Fetches()

    def _make_store(self) -> Store:
        own_host = str(self.config.get("advertise_host", "")).strip("[]") or _HOST
        host, port = self.config.get("host", own_host), self.config.get("port", _PORT)
        if not isinstance(host, str) or not host:
            raise ConfigError(f"host is {host!r}; the address of Yuanrong's datasystem is wanted")
        if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
            raise ConfigError(f"port is {port!r}; the port of Yuanrong's datasystem is wanted")
        request_timeout_s = number(self.config, "request_timeout_s", _REQUEST_TIMEOUT_S, 0.1)
        self._limits = limits_of(self.config, None)
        package = load_package()
        #: The library's parameters of a stored value.
        self.set_param = package.SetParam()
        self._datasystem = YuanrongClient(package, host, port, request_timeout_s)
        return YuanrongStore(self.namespace, self._datasystem, self._limits)

    @property
    def client(self) -> Any:
        """The package's own client; None before the first call that needs it."""
        return self._datasystem.client

    def _describe(self, kept: Kept) -> dict[str, Any]:
        watched = {"watched": True} if self._limits.window_size is not None else {}
        return {"generation": kept.generation, "data_size": kept.size_bytes, **watched}

    def _fetch(self, edge: tuple[str, str, str], metadata: dict[str, Any]) -> tuple[Loan, memoryview] | None:
        digest = key_digest(self.namespace, *edge)
        generation = metadata.get("generation")
        with self._fetches.under_way(edge[2]) as fetching:
            if not isinstance(generation, bytes) or len(generation) != GENERATION_BYTES:
                # Keys can be guessed, and whoever names one in a reference could have others' hand-offs.
                generation = self._wait_for(digest, fetching, metadata.get("timeout_s")) if self.by_key else None
            if generation is None:
                return None
            payload = payload_name(digest, generation)
            consume = bool(metadata.get("consume", True))
            if consume and not self._datasystem.put_mark(claim_name(payload), CLAIM_S):
                return None
            buffer = self._datasystem.read(payload, self._copy)
        if buffer is None:
            return None
        self._note_fetched(payload, consume=consume, watched=bool(metadata.get("watched")))
        return buffer, buffer.payload()

    def _wait_for(self, digest: bytes, fetching: Fetch, timeout_s: Any) -> bytes | None:
        longest_s = self.get_sub_timeout_ms / 1000
        if isinstance(timeout_s, int | float):
            longest_s = min(longest_s, timeout_s)
        deadline_s = time.monotonic() + longest_s
        while True:
            found = self._datasystem.read(key_name(digest), bytes)
            if found is not None or time.monotonic() >= deadline_s:
                return found
            time.sleep(_LOOK_EVERY_S)
            fetching.check()

    def _copy(self, view: memoryview) -> PooledBuffer:
        buffer = self._memory.take_buffer(len(view))
        np.copyto(buffer, np.frombuffer(view, np.uint8))
        return buffer

    def _note_fetched(self, payload: str, *, consume: bool, watched: bool) -> None:
        if consume:
            # The claim stays, so that a later consumer does not take the hand-off for an available one.
            self._datasystem.delete([payload])
        elif watched:
            self._datasystem.put_mark(fetched_name(payload), whole_seconds(self._limits.ttl_s))

    def cancel(self, get_key: str) -> None:
        """See OmniConnectorBase."""
        self._fetches.cancel(get_key)

    def health(self) -> dict[str, Any]:
        """See OmniConnectorBase. ``reason`` says why the datasystem can't be used."""
        try:
            self._datasystem.exist([key_name(b"")])
        except TransferError as error:
            return {**super().health(), "status": "unhealthy", "reason": str(error)}
        return super().health()

    def close(self) -> None:
        """See OmniConnectorBase."""
        self._fetches.close()
        super().close()
        self._memory.close()
