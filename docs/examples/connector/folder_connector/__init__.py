"""``FolderConnector``: hand-offs as files in a folder that the hosts of both stages mount.

One file per hand-off, under a name that cannot be guessed; the metadata carries the name to the consumer.
"""

from __future__ import annotations

import re
import secrets
import threading
from pathlib import Path
from typing import Any

from omni_discovery.errors import ConfigError, OmniError
from stage_runtime.connectors import OmniConnectorBase

_NAME = re.compile(r"[0-9a-f]{32}")


class FolderConnector(OmniConnectorBase):
    """``extra: {folder: /mnt/handoffs}``. Files of a producer that is killed stay: empty the folder now and then."""

    def __init__(self, config: dict[str, Any]) -> None:
        if unknown := set(config) - {"folder", "window_size", "max_inflight"}:
            raise ConfigError(f"FolderConnector: unknown {sorted(unknown)}; known are folder and the edge's bounds")
        self._folder = Path(config.get("folder", ""))
        if not config.get("folder") or not self._folder.is_dir():
            raise ConfigError(f"FolderConnector: folder is {config.get('folder')!r}; give one that all hosts mount")
        self._lock = threading.Lock()
        #: Files of hand-offs that were put here and not cleaned up, by key. Guarded by ``_lock``.
        self._files: dict[str, Path] = {}
        self._counts = {"puts": 0, "gets": 0, "failures": 0}
        self._is_closed = False

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        """See OmniConnectorBase. Never raises: the engine's thread calls it."""
        if self._is_closed:
            return self._failed("the connector is closed")
        name = secrets.token_hex(16)
        file = self._folder / name
        try:
            content = self.serialize_obj(data)
            # A consumer must never see half a file.
            part = file.with_suffix(".part")
            part.write_bytes(content)
            part.rename(file)
        except (OSError, OmniError) as error:
            return self._failed(str(error))
        with self._lock:
            replaced = self._files.pop(put_key, None)
            self._files[put_key] = file
            self._counts["puts"] += 1
        if replaced is not None:
            replaced.unlink(missing_ok=True)
        return True, len(content), {"file": name}

    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        """See OmniConnectorBase. Needs the metadata of ``put``."""
        name = (metadata or {}).get("file")
        # The name comes from another host: it must not lead out of the folder.
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            return None
        file = self._folder / name
        try:
            if (metadata or {}).get("consume", True):
                # Of several that rename the file at once, one succeeds.
                mine = file.with_suffix(f".{secrets.token_hex(8)}")
                file.rename(mine)
                content = mine.read_bytes()
                mine.unlink()
            else:
                content = file.read_bytes()
        except FileNotFoundError:
            return None
        with self._lock:
            self._counts["gets"] += 1
        return self.deserialize_obj(content), len(content)

    def cleanup(self, request_id: str) -> None:
        """See OmniConnectorBase. A request's keys are its id, alone or with ``_`` and more before or behind it."""
        with self._lock:
            keys = [
                key
                for key in self._files
                if key == request_id or key.startswith(f"{request_id}_") or key.endswith(f"_{request_id}")
            ]
            files = [self._files.pop(key) for key in keys]
        for file in files:
            file.unlink(missing_ok=True)

    def health(self) -> dict[str, Any]:
        """See OmniConnectorBase."""
        status = "healthy" if self._folder.is_dir() and not self._is_closed else "unhealthy"
        with self._lock:
            return {"status": status, **self._counts}

    def close(self) -> None:
        """See OmniConnectorBase."""
        self._is_closed = True
        with self._lock:
            files, self._files = self._files, {}
        for file in files.values():
            file.unlink(missing_ok=True)

    def _failed(self, reason: str) -> tuple[bool, int, None]:
        self.last_error = reason
        with self._lock:
            self._counts["failures"] += 1
        return False, 0, None
