"""AutoConnector: shared memory if both replicas are on one host, TCP if not, chosen for each hand-off.

The producer stores a hand-off once, in a shared-memory segment, and offers it both ways. The consumer maps the segment
if it can, else it fetches the bytes of that segment over TCP.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final

from stage_runtime.config import SerializationError
from stage_runtime.connectors.errors import lacks_descriptors
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
    """Return the kernel's id of this machine's boot, unique to it; empty if it can't be read."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


class AutoConnector(StoringConnector):
    """Hands over in shared memory or over TCP; without ``by_key``, below ``shm_threshold_bytes`` inside the metadata.

    Hand-offs for which shared memory has no room are kept in the producer's own memory. ``get`` consumes what it
    returns, unless the metadata says ``consume: False``; without metadata it looks into shared memory only, and without
    ``by_key`` nowhere.
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
        self._reader = ShmReader(self.namespace, str(self._directory), by_key=self.by_key)
        return Store(self.namespace, self._directory, limits_of(self.config, None), in_memory=True)

    def _describe(self, kept: Kept) -> dict[str, Any]:
        metadata: dict[str, Any] = {"generation": kept.generation}
        if kept.block.path is not None:
            metadata |= {**described(kept), "boot_id": self._boot_id}
        try:
            return metadata | self._tcp.offer(kept)
        except OSError as error:
            if kept.block.path is None:
                raise
            logger.warning("connector.not_listening reason=%s", error)
            return metadata

    def endpoint(self) -> dict[str, Any]:
        """See OmniConnectorBase. Listens from now on; empty if it can't, since shared memory needs no address."""
        try:
            return self._tcp.endpoint()
        except OSError as error:
            logger.warning("connector.not_listening reason=%s", error)
            return {}

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
        if "shm" not in metadata:
            # A generation without a segment is another transport's.
            metadata = {**metadata, "generation": None}
        try:
            view = self._reader.read(edge, metadata)
            return None if view is None else (view, view.payload())
        except (OSError, SerializationError) as error:
            # The segment is another user's, or in another container's folder of that name: TCP still reaches it.
            if "token" not in metadata or lacks_descriptors(error):
                raise
            logger.info("connector.not_attached reason=%s", error)
            return None

    def cancel(self, get_key: str) -> None:
        """See OmniConnectorBase."""
        self._tcp.cancel(get_key)

    def health(self) -> dict[str, Any]:
        """See OmniConnectorBase. Also counts the fetches by shared memory and by network."""
        ways = {"by_shared_memory": self._by_memory, "by_network": self._by_network}
        return {**super().health(), **self._tcp.counts(), **ways}

    def close(self) -> None:
        """See OmniConnectorBase."""
        self._tcp.close()
        super().close()
        self._reader.close()
