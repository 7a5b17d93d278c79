"""Shared memory between the stages of one host, without a copy on the consumer's side."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from stage_runtime.connectors.layout import key_digest, payload_path
from stage_runtime.connectors.settings import COMMON, limits_of
from stage_runtime.connectors.shm_reader import View, attach
from stage_runtime.connectors.store import Kept, Store
from stage_runtime.connectors.storing import StoringConnector

DEFAULT_DIRECTORY: Final = "/dev/shm"  # noqa: S108 - files there are made with O_EXCL, and only ours are read


def read_segment(
    namespace: str, directory: str, edge: tuple[str, str, str], metadata: dict[str, Any]
) -> tuple[View, memoryview] | None:
    """A hand-off out of ``directory``; None if it is not there. Raise SerializationError for a strange file."""
    digest = key_digest(namespace, *edge)
    generation = metadata.get("generation")
    view = attach(
        payload_path(directory, digest),
        digest,
        generation if isinstance(generation, bytes) else None,
        consume=bool(metadata.get("consume", True)),
    )
    return None if view is None else (view, view.payload())


class SharedMemoryConnector(StoringConnector):
    """Hand-offs below ``shm_threshold_bytes`` travel inside the metadata, larger ones in /dev/shm.

    ``get`` consumes what it returns, unless the metadata says ``consume: False``: then the producer keeps it until
    ``cleanup`` or ``close``. The key is enough to find it; metadata of other transports is ignored.
    """

    known_settings = COMMON | {"directory"}

    def _make_store(self) -> Store:
        self._directory = Path(self.config.get("directory", DEFAULT_DIRECTORY))
        return Store(self.namespace, self._directory, limits_of(self.config, self._directory), in_memory=False)

    def _describe(self, kept: Kept) -> dict[str, Any]:
        return {"shm": kept.segment.name, "generation": kept.generation}

    def _fetch(self, edge: tuple[str, str, str], metadata: dict[str, Any]) -> tuple[View, memoryview] | None:
        self._store.tidy()
        return read_segment(self.namespace, str(self._directory), edge, metadata)

    def health(self) -> dict[str, Any]:
        """See OmniConnectorBase."""
        usable = os.access(self._directory, os.W_OK)
        return {**super().health(), "status": "healthy" if usable else "unhealthy"}
