"""The per-user folder in which processes on one machine find each other's files."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def runtime_dir(xdg_runtime_dir: str | None) -> Path:
    """The per-user folder: under XDG_RUNTIME_DIR where the system has one, else under the temporary folder."""
    return Path(xdg_runtime_dir or Path(tempfile.gettempdir()) / f"omni-{os.getuid()}") / "omni"


def is_private(folder: Path) -> bool:
    """Whether ``folder`` is a folder that only this user writes to: in the temporary folder, others may be first."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
