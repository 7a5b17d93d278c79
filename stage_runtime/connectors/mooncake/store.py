"""Hand-offs in a Mooncake store: a master knows where objects are, and each process contributes memory."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from omni_discovery.errors import ConfigError
from stage_runtime.connectors.errors import TransferError
from stage_runtime.connectors.mooncake.engine import check_devices, check_host, check_protocol, host_of
from stage_runtime.connectors.mooncake.store_client import StoreClient, StoreConfig, client_of
from stage_runtime.connectors.serialization import Buffer
from stage_runtime.connectors.settings import COMMON, limits_of, number
from stage_runtime.connectors.store.connector import StoringConnector
from stage_runtime.connectors.store.layout import key_digest
from stage_runtime.connectors.store.memory import Loan, ReceivePool
from stage_runtime.connectors.store.store import Kept, Store
from stage_runtime.connectors.tcp.client import Fetch, Fetches

logger = logging.getLogger(__name__)

_SETTINGS: Final = frozenset(
    {
        "advertise_host",
        "bind_host",
        "device_name",
        "host",
        "localbuf",
        "master",
        "metadata_server",
        "proto",
        "protocol",
        "rdma",
        "segment",
        "timeout_s",
    }
)
_MIB: Final = 1 << 20
_TIMEOUT_S: Final = 30.0
#: Bound of the producer's calls that move no hand-off.
_SHORT_S: Final = 5.0
#: Bound of a health check of the master.
_HEALTH_S: Final = 2.0
_NAME_BYTES: Final = 32
#: Suffix of the object that marks another one as fetched.
_FETCHED: Final = "-fetched"
_OBJECT: Final = re.compile(rf"omni-[0-9a-f]{{{2 * _NAME_BYTES}}}")
#: A name that no object has.
_NOBODY: Final = "omni-nobody"


def _index_name(digest: bytes) -> str:
    """The name of the object that holds the name of a key's present hand-off."""
    return f"omni-key-{digest.hex()}"


class _KeyIndex:
    """The names of the hand-offs by the hashes of their keys, as objects of the store."""

    def __init__(self, client: StoreClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._memory = ReceivePool(0)

    def name_of(self, digest: bytes, deadline_s: float, fetching: Fetch | None = None) -> str | None:
        """The name of the hand-off under a key; None if there is none. Raise TransferError."""
        found = self._client.get(_index_name(digest), self._memory, deadline_s, fetching)
        name = "" if found is None else found.tobytes().decode("ascii", "replace")
        return name if _OBJECT.fullmatch(name) else None

    def set_name(self, digest: bytes, name: str) -> None:
        """Have the key mean that hand-off from now on. Raise TransferError."""
        deadline_s = time.monotonic() + self._timeout_s
        # An object is never overwritten. In between, the key has no hand-off.
        self._client.remove(_index_name(digest), deadline_s)
        self._client.put(_index_name(digest), (name.encode("ascii"),), deadline_s)

    def drop_name(self, digest: bytes, name: str) -> None:
        """Drop the entry of a key if it still means that hand-off. Raise TransferError."""
        deadline_s = time.monotonic() + _SHORT_S
        if self.name_of(digest, deadline_s) == name:
            self._client.remove(_index_name(digest), deadline_s)


class _StoredObject:
    """See MemoryBlock; one hand-off in the store. Its name is random: the metadata has it, and the index, if any."""

    path: str | None = None

    def __init__(self, client: StoreClient, timeout_s: float, index: _KeyIndex | None) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._index = index
        self._digest = b""
        self.pins = 0
        self.name = f"omni-{os.urandom(_NAME_BYTES).hex()}"

    def fill(self, parts: Sequence[Buffer], size_bytes: int, generation: bytes, key_digest: bytes) -> None:
        """See MemoryBlock."""
        self._client.put(self.name, parts, time.monotonic() + self._timeout_s)
        if self._index is not None:
            self._digest = key_digest
            self._index.set_name(key_digest, self.name)

    def publish(self, path: str) -> None:
        """See MemoryBlock. Does nothing: it has no path."""

    def hide(self) -> bool:
        """See MemoryBlock."""
        return True

    def note_fetched(self) -> None:
        """See MemoryBlock. Does nothing: consumers note it in the store."""

    def view(self, size_bytes: int) -> memoryview:
        """See MemoryBlock. Empty: the hand-off is not in this process."""
        return memoryview(b"")

    @property
    def fetched(self) -> bool:
        """See MemoryBlock."""
        return self._is_there(self.name + _FETCHED) or self.consumed

    @property
    def consumed(self) -> bool:
        """See MemoryBlock."""
        return not self._is_there(self.name, unknown=True)

    def drop(self) -> None:
        """See MemoryBlock. An object that can't be removed now goes with this process's segment."""
        try:
            for name in (self.name, self.name + _FETCHED):
                self._client.remove(name, time.monotonic() + _SHORT_S)
            if self._index is not None and self._digest:
                self._index.drop_name(self._digest, self.name)
        except TransferError as error:
            logger.warning("mooncake.not_removed reason=%s", error)

    def _is_there(self, name: str, *, unknown: bool = False) -> bool:
        try:
            return self._client.is_there(name, time.monotonic() + _SHORT_S)
        except TransferError:
            return unknown


class _ObjectPool:
    """See BlockPool; the Mooncake store as memory of a ``Store``."""

    free_bytes = 0

    def __init__(self, client: StoreClient, timeout_s: float, index: _KeyIndex | None) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._index = index
        self._lock = threading.Lock()
        self._there = 0
        self.made = 0

    def take_block(self, size_bytes: int) -> _StoredObject:
        """See BlockPool."""
        with self._lock:
            self._there += 1
            self.made = max(self.made, self._there)
        return _StoredObject(self._client, self._timeout_s, self._index)

    def give_back(self, segment: Any) -> None:
        """See BlockPool."""
        segment.drop()
        with self._lock:
            self._there -= 1

    def shrink(self) -> None:
        """See BlockPool."""

    def trim(self) -> None:
        """See BlockPool."""

    def close(self) -> None:
        """See BlockPool."""


class MooncakeStoreConnector(StoringConnector):
    """Hand-offs are objects of the store; without ``by_key``, small ones travel inside the metadata.

    An object is in the segment of the process that put it, as long as that has room, and goes with the process. With
    ``by_key`` a second object holds its name under the hash of namespace, edge and key. The process connects to the
    store with its first hand-off.
    """

    known_settings = COMMON | _SETTINGS

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        given = config or {}
        self.host = check_host(host_of(given))
        self.master = str(given.get("master", "127.0.0.1:50051"))
        if not self.master.rpartition(":")[2].isdigit():
            raise ConfigError(f"master is {self.master!r}; host:port of a mooncake_master is wanted")
        #: Where clients find each other: directly, unless a metadata server is named.
        self.metadata = str(given.get("metadata_server", "P2PHANDSHAKE"))
        self.proto = check_protocol(given.get("proto", given.get("protocol", "tcp")))
        self.rdma = str(given.get("rdma", given.get("device_name", "")))
        check_devices(self.proto, self.rdma)
        self.segment = int(number(given, "segment", 512 * _MIB, 1))
        self.localbuf = int(number(given, "localbuf", 64 * _MIB, 1))
        self._timeout_s = float(number(given, "timeout_s", _TIMEOUT_S))
        way = StoreConfig(self.host, self.metadata, self.segment, self.localbuf, self.proto, self.rdma, self.master)
        self._client = client_of(way)
        self._index = _KeyIndex(self._client, self._timeout_s)
        super().__init__(config)
        self._marks = self.config.get("window_size") not in (None, -1)
        self._memory = ReceivePool(limits_of(self.config, None).pool_bytes)
        self._fetches = Fetches()

    def _make_store(self) -> Store:
        memory = _ObjectPool(self._client, self._timeout_s, self._index if self.by_key else None)
        return Store(self.namespace, None, limits_of(self.config, None), in_memory=False, memory=memory)

    def _describe(self, kept: Kept) -> dict[str, Any]:
        return {"mooncake_key": kept.block.name, "data_size": kept.size_bytes, "mark_fetched": self._marks}

    def _fetch(self, edge: tuple[str, str, str], metadata: dict[str, Any]) -> tuple[Loan, Any] | None:
        name = metadata.get("mooncake_key")
        timeout_s = metadata.get("timeout_s", self._timeout_s)
        deadline_s = time.monotonic() + (timeout_s if isinstance(timeout_s, int | float) else self._timeout_s)
        with self._fetches.under_way(edge[2]) as fetching:
            if not isinstance(name, str):
                digest = key_digest(self.namespace, *edge)
                name = self._index.name_of(digest, deadline_s, fetching) if self.by_key else None
            # A reference may name any object of the store: one of the index, or a job of a hub.
            if name is None or not _OBJECT.fullmatch(name):
                return None
            buffer = self._client.get(name, self._memory, deadline_s, fetching)
            if buffer is None:
                return None
            if metadata.get("consume", True):
                if not self._client.remove(name, deadline_s):
                    # Another consumer was faster.
                    return None
            elif metadata.get("mark_fetched") and not self._client.is_there(name + _FETCHED, deadline_s):
                self._client.put(name + _FETCHED, (b"1",), deadline_s)
        return buffer, buffer.payload()

    @property
    def store(self) -> Any:
        """The library's store; None before the first hand-off."""
        return self._client.library_store

    @property
    def pin(self) -> Any:
        """The library's configuration of the objects that this process puts; None before the first hand-off."""
        return self._client.object_config

    def cancel(self, get_key: str) -> None:
        """See OmniConnectorBase."""
        self._fetches.cancel(get_key)

    def health(self) -> dict[str, Any]:
        """See OmniConnectorBase. ``reason`` says why the store can't be used."""
        try:
            self._client.is_there(_NOBODY, time.monotonic() + _HEALTH_S)
        except TransferError as error:
            return {**super().health(), "status": "unhealthy", "reason": str(error)}
        return super().health()

    def close(self) -> None:
        """See OmniConnectorBase. The process stays a client of the store until it ends."""
        self._fetches.close()
        super().close()
        self._memory.close()
