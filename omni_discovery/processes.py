"""Processes: the per-user folder in which they find each other's files, children that end with their parent, limits."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import stat
import sys
import tempfile
from pathlib import Path
from typing import Final

from omni_discovery.errors import ConfigError

_PR_SET_PDEATHSIG: Final = 1
#: The fewest open files to start with. An idle replica has two dozen and two more for each hub, besides those of its
#: engine and hand-offs; a hub has as many, and some for each replica and each client.
LEAST_FILES: Final = 256


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


def write_private(path: Path, content: bytes) -> None:
    """Replace a file atomically, readable by its owner only. Raise OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def die_with_parent(parent_pid: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal when its parent ends, however it ends.

    ``parent_pid`` is the process that started this one: if it is gone already, this process exits at once. Call it
    first thing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(0)


def has_ended(pid: int) -> bool:
    """Whether a child of this process has ended. The child is not reaped by this."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def end_group(pid: int) -> None:
    """Kill the process group that ``pid`` leads, or led and is not reaped yet. A group that is gone is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def raise_descriptor_limit(program: str) -> int:
    """Raise the soft limit of open files to the hard limit, and return it. Raise ConfigError if that is too low.

    ``program`` names this process in the error, such as ``a hub``.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < LEAST_FILES:
        raise ConfigError(
            f"only {hard} files may be open here, and {program} needs {LEAST_FILES} at least; raise the hard limit: "
            "'ulimit -Hn 65536' as root, or LimitNOFILE= of the systemd unit"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard
