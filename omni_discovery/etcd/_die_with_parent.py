"""Script that starts etcd so that the kernel kills it when the parent process dies.

It reads ``{"parent_pid": ..., "command": [...]}`` from stdin. A script, because running Python between fork and exec is
not safe in a process that has threads.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask the kernel for SIGKILL at the parent's death, then exec the command with an empty environment."""
    order = json.load(sys.stdin)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before prctl was called.
    if os.getppid() != order["parent_pid"]:
        sys.exit(1)
    command = order["command"]
    # Empty, so that no ETCD_ variable of the parent overrides a flag.
    os.execve(command[0], command, {})  # noqa: S606  (no shell is the point)


if __name__ == "__main__":
    main()
