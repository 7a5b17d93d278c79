"""What a process is given: a parent that it never outlives (Linux), and how many files it may have open."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from typing import Final

from omni_discovery.errors import ConfigError

_PR_SET_PDEATHSIG: Final = 1
#: An idle replica has two dozen files open and two more for each hub, its engine and its hand-offs some besides. A hub
#: has as many, and some for each replica and each client.
LEAST_FILES: Final = 256


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


def raise_descriptor_limit(who: str) -> None:
    """Take all the open files that this user may have. Raise ConfigError if ``who``, in words, can't live with that."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < LEAST_FILES:
        raise ConfigError(
            f"only {hard} files may be open here, and {who} needs {LEAST_FILES} at least; raise the hard limit: "
            "'ulimit -Hn 65536' as root, or LimitNOFILE= of the systemd unit"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
