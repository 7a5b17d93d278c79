"""Limits of time for tests: as meant on a quiet machine, and longer on a busy one."""

from __future__ import annotations

import os

#: Also a quiet machine has a bad moment.
_LEAST = 2.0


def soon_s(limit_s: float) -> float:
    """Return how many seconds a test may wait for what takes less than ``limit_s`` on a quiet machine.

    The limit grows with the number of processes that want a core, as the load average of the last minute tells it, so
    that a machine which is busy with something else fails no test.
    """
    return _LEAST * patience_s(limit_s)


def patience_s(limit_s: float) -> float:
    """Return how long a test may wait for what has to come, and has come within ``limit_s`` on a quiet machine."""
    wanted = os.getloadavg()[0] / (os.cpu_count() or 1)
    return limit_s * max(1.0, wanted)
