"""Shared memory where both stages are on one host, TCP where they are not, chosen anew for each hand-off.

The producer stores once and offers it both ways; the consumer takes the segment where it lies if it can, else it has it
sent out of that same segment.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final

from stage_runtime.config import SerializationError
from stage_runtime.connectors.settings import COMMON, limits_of
from stage_runtime.connectors.shm.connector import DEFAULT_DIRECTORY, described
from stage_runtime.connectors.shm.reader import ShmReader
from stage_runtime.connectors.store.connector import StoringConnector
from stage_runtime.connectors.store.memory import Loan
from stage_runtime.connectors.store.store import Kept, Store
from stage_runtime.connectors.tcp.connector import TCP_SETTINGS, TcpEnd

logger = logging.getLogger(__name__)

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """What tells this machine, since it was started, from all others; empty where that can't be said."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


class AutoConnector(StoringConnector):
    """Hand-offs below ``shm_threshold_bytes`` travel inside the metadata, larger ones in shared memory or over TCP.

    What finds no room in shared memory waits in the producer's own memory. ``get`` consumes what it returns, unless the
    metadata says ``consume: False``; without the metadata it looks into shared memory only.
    """

    known_settings = COMMON | TCP_SETTINGS | {"directory"}

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__(config)
        self._tcp = TcpEnd(self.config, self._store)
        self._boot_id = boot_id()
        self._by_memory = self._by_network = 0

    def _make_store(self) -> Store:
        self._directory: Path | None = Path(self.config.get("directory", DEFAULT_DIRECTORY))
        if not self._directory.is_dir():
            self._directory = None
        self._reader = ShmReader(self.namespace, str(self._directory))
        return Store(self.namespace, self._directory, limits_of(self.config, None), in_memory=True)

    def _describe(self, kept: Kept) -> dict[str, Any]:
        metadata: dict[str, Any] = {"generation": kept.generation}
        if kept.segment.path is not None:
            metadata |= {**described(kept.segment), "boot_id": self._boot_id}
        try:
            return metadata | self._tcp.offer(kept)
        except OSError as error:
            if kept.segment.path is None:
                raise
            logger.warning("connector.not_listening reason=%s", error)
            return metadata

    def _fetch(self, edge: tuple[str, str, str], metadata: dict[str, Any]) -> tuple[Loan, memoryview] | None:
        self._store.tidy()
        here = metadata.get("boot_id", self._boot_id) == self._boot_id
        if self._directory is not None and here and ("shm" in metadata or "token" not in metadata):
            found = self._in_memory(edge, metadata)
            if found is not None:
                with self._lock:
                    self._by_memory += 1
                return found
        buffer = self._tcp.fetch(edge[2], metadata)
        if buffer is None:
            return None
        with self._lock:
            self._by_network += 1
        return buffer, buffer.payload()

    def _in_memory(self, edge: tuple[str, str, str], metadata: dict[str, Any]) -> tuple[Loan, memoryview] | None:
        try:
            view = self._reader.read(edge, metadata)
            return None if view is None else (view, view.payload())
        except (OSError, SerializationError) as error:
            # Another user's, or another container's folder of the same name: the network reaches it all the same.
            if "token" not in metadata:
                raise
            logger.info("connector.not_attached reason=%s", error)
            return None

    def cancel(self, get_key: str) -> None:
        """See OmniConnectorBase."""
        self._tcp.cancel(get_key)

    def health(self) -> dict[str, Any]:
        """See OmniConnectorBase. Counts also which way the fetches went."""
        ways = {"by_shared_memory": self._by_memory, "by_network": self._by_network}
        return {**super().health(), **self._tcp.counts(), **ways}

    def close(self) -> None:
        """See OmniConnectorBase."""
        self._tcp.close()
        super().close()
        self._reader.close()
