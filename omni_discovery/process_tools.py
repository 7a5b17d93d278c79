"""Child processes that never outlive their parent (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def die_with_parent(parent_pid: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal when its parent ends, however it ends.

    ``parent_pid`` is who started us: if that process is gone already, we exit at once. Call it first thing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(0)


def has_ended(pid: int) -> bool:
    """Whether a child of this process has ended; it stays to be reaped."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def end_group(pid: int) -> None:
    """Kill all that is left of the process group that ``pid`` leads, or led as long as it is not reaped."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
