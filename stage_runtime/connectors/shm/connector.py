"""Shared memory between the stages of one host, without a copy on the consumer's side."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from stage_runtime.connectors.settings import COMMON, limits_of
from stage_runtime.connectors.shm.reader import ShmReader, ShmView
from stage_runtime.connectors.store.connector import StoringConnector
from stage_runtime.connectors.store.shm_blocks import ShmBlock
from stage_runtime.connectors.store.store import Kept, Store

DEFAULT_DIRECTORY: Final = "/dev/shm"  # noqa: S108 - files there are made with O_EXCL, and only ours are read


def described(kept: Kept) -> dict[str, Any]:
    """Where readers of this host find a hand-off, for the metadata; only its size if it is not in shared memory."""
    block = kept.block
    if block.path is None or not isinstance(block, ShmBlock):
        return {"size": kept.size_bytes}
    return {"size": kept.size_bytes, "shm": block.name, "segment": block.id}


class SharedMemoryConnector(StoringConnector):
    """Hand-offs in /dev/shm; without ``by_key``, those below ``shm_threshold_bytes`` travel inside the metadata.

    ``get`` consumes what it returns, unless the metadata says ``consume: False``: then the producer keeps it until
    ``cleanup`` or ``close``. With ``by_key`` the key is enough to find it, and metadata of other transports is ignored.
    """

    known_settings = COMMON | {"directory"}

    def _make_store(self) -> Store:
        self._directory = Path(self.config.get("directory", DEFAULT_DIRECTORY))
        self._reader = ShmReader(self.namespace, str(self._directory), by_key=self.by_key)
        return Store(self.namespace, self._directory, limits_of(self.config, self._directory), in_memory=False)

    def _describe(self, kept: Kept) -> dict[str, Any]:
        return {"generation": kept.generation, **described(kept)}

    def _fetch(self, edge: tuple[str, str, str], metadata: dict[str, Any]) -> tuple[ShmView, memoryview] | None:
        self._store.tidy()
        if "shm" not in metadata:
            # A generation without a segment is another transport's.
            metadata = {**metadata, "generation": None}
        view = self._reader.read(edge, metadata)
        return None if view is None else (view, view.payload())

    def close(self) -> None:
        """See OmniConnectorBase."""
        super().close()
        self._reader.close()

    def health(self) -> dict[str, Any]:
        """See OmniConnectorBase."""
        health = super().health()
        if not os.access(self._directory, os.W_OK):
            health |= {"status": "unhealthy", "reason": f"{self._directory} can't be written to"}
        return health
