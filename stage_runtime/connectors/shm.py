"""Shared memory between stages on one host: one file in /dev/shm per hand-off.

A file is written under a name of its own and renamed when complete, so a reader never sees half of it; a reader
claims it by another rename, so only one gets it. Names are hashes over namespace, edge and key: deployments never
meet. Every file says which process made it, and what dead processes left is swept away at the next start.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import struct
from pathlib import Path
from typing import Any, Final

from omni_discovery.errors import ConfigError
from stage_runtime.connectors.base import OmniConnectorBase
from stage_runtime.connectors.serialization import Buffer, deserialize, serialize_parts
from stage_runtime.connectors.shm_owner import ME, Owner
from stage_runtime.errors import SerializationError

logger = logging.getLogger(__name__)

_HEADER: Final = struct.Struct("<8sQQQQ24x")
_MAGIC: Final = b"OMNISHM1"
_PREFIX: Final = "omni-"
_KNOWN_KEYS: Final = {"shm_threshold_bytes", "stage_id", "device", "namespace", "directory"}


class SharedMemoryConnector(OmniConnectorBase):
    """Hand-offs below ``shm_threshold_bytes`` travel inside the metadata, larger ones in /dev/shm.

    ``get`` consumes what it returns, unless the metadata says ``consume: False``: then the producer keeps it until
    ``cleanup`` or ``close``. Metadata of other transports is ignored.
    """

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        config = dict(config or {})
        if unknown := sorted(set(config) - _KNOWN_KEYS):
            raise ConfigError(f"SharedMemoryConnector: unknown {unknown}; known are {sorted(_KNOWN_KEYS)}")
        self.config = config
        self.stage_id = config.get("stage_id", -1)
        self.device = config.get("device", "cpu")
        self.threshold = int(config.get("shm_threshold_bytes", 65536))
        self._namespace = str(config.get("namespace", ""))
        self._directory = Path(config.get("directory", "/dev/shm"))  # noqa: S108
        #: What was put and may still be there: (from, to, key) -> path.
        self._pending: dict[tuple[str, str, str], Path] = {}
        self._puts = self._gets = self._failures = 0
        sweep(self._directory)

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        """See OmniConnectorBase. Never raises: what can't be stored comes back as ``(False, 0, None)``."""
        try:
            parts = serialize_parts(data)
            size_bytes = sum(len(part) for part in parts)
            if size_bytes < self.threshold:
                self._puts += 1
                return True, size_bytes, {"inline": b"".join(parts)}
            path = self._path(from_stage, to_stage, put_key)
            _write(path, parts, size_bytes)
        except (OSError, SerializationError) as error:
            self._failures += 1
            logger.warning("shm.put_failed from=%s to=%s reason=%s", from_stage, to_stage, error)
            return False, 0, None
        self._pending[from_stage, to_stage, put_key] = path
        self._puts += 1
        return True, size_bytes, {"shm": path.name}

    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        """See OmniConnectorBase. Raise SerializationError for content that is no hand-off."""
        metadata = metadata or {}
        inline = metadata.get("inline")
        if isinstance(inline, bytes):
            self._gets += 1
            return deserialize(inline), len(inline)
        path = self._path(from_stage, to_stage, get_key)
        try:
            content = _read(path, consume=bool(metadata.get("consume", True)))
        except FileNotFoundError:
            return None
        self._gets += 1
        return deserialize(content), len(content)

    def cleanup(self, request_id: str) -> None:
        """Unlink what was put under the request's id, or under a key that starts or ends with it and an underscore."""
        for edge in [edge for edge in self._pending if _belongs(edge[2], request_id)]:
            self._pending.pop(edge).unlink(missing_ok=True)

    def health(self) -> dict[str, Any]:
        """See OmniConnectorBase."""
        usable = os.access(self._directory, os.W_OK)
        return {
            "status": "healthy" if usable else "unhealthy",
            "puts": self._puts,
            "gets": self._gets,
            "failures": self._failures,
            "pending": sum(path.exists() for path in self._pending.values()),
        }

    def close(self) -> None:
        """Unlink what nobody fetched."""
        while self._pending:
            self._pending.popitem()[1].unlink(missing_ok=True)

    def _path(self, from_stage: str, to_stage: str, key: str) -> Path:
        parts = (self._namespace, from_stage, to_stage, key)
        digest = hashlib.blake2b(digest_size=16)
        for part in parts:
            encoded = part.encode("utf-8")
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        return self._directory / f"{_PREFIX}{digest.hexdigest()}"


def _belongs(key: str, request_id: str) -> bool:
    return key == request_id or key.startswith(f"{request_id}_") or key.endswith(f"_{request_id}")


def _write(path: Path, parts: list[Buffer], size_bytes: int) -> None:
    # Written with write(), not through a mapping: a full /dev/shm is then an error and not a bus error.
    partial = path.with_name(f"{path.name}.{ME.name}.part")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            header = _HEADER.pack(_MAGIC, size_bytes, ME.pid, ME.started, ME.pid_namespace)
            for part in (header, *parts):
                view = memoryview(part)
                while view:
                    view = view[file.write(view) :]
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _read(path: Path, *, consume: bool) -> memoryview:
    if consume:
        claimed = path.with_name(f"{path.name}.{ME.name}.part")
        path.rename(claimed)
        path = claimed
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _HEADER.size:
                raise SerializationError(f"{path} is no hand-off")
            # Private and writable: tensors are views of the mapping, and writing to them changes nobody's file.
            mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    finally:
        if consume:
            path.unlink(missing_ok=True)
    magic, length, *_ = _HEADER.unpack_from(mapping)
    if magic != _MAGIC or length != size - _HEADER.size:
        raise SerializationError(f"{path} is no hand-off, or is cut short")
    return memoryview(mapping)[_HEADER.size :]


def sweep(directory: Path) -> int:
    """Unlink what processes of this machine left that are dead by now; say how many files that were."""
    swept = 0
    for path in directory.glob(f"{_PREFIX}*"):
        owner = _owner_of(path)
        if owner is not None and owner.is_dead():
            path.unlink(missing_ok=True)
            swept += 1
    if swept:
        logger.info("shm.swept files=%d", swept)
    return swept


def _owner_of(path: Path) -> Owner | None:
    if path.suffix == ".part":
        return Owner.parse(path.name.split(".")[1])
    try:
        with path.open("rb") as file:
            magic, _, pid, started, pid_namespace = _HEADER.unpack(file.read(_HEADER.size))
    except (OSError, struct.error):
        return None
    return Owner(pid, started, pid_namespace) if magic == _MAGIC else None
