"""LogOnce: keeps a line that would be logged again and again to one line. LinePace: keeps many lines to few. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable


class LogOnce:
    """Remembers which lines were logged, by a key of the caller's; belongs to one thread.

    At most ``most_keys`` keys are remembered, the one logged longest ago goes first: with 1, a line is logged whenever
    it differs from the last. ``now_s`` returns monotonic seconds; it is only called for lines that may be repeated.
    """

    def __init__(self, now_s: Callable[[], float] = lambda: 0.0, most_keys: int = 1000) -> None:
        self._now_s = now_s
        self._most_keys = most_keys
        #: When each line was logged, in that order.
        self._logged_at_s: dict[Hashable, float] = {}

    def should(self, key: Hashable = "", every_s: float = math.inf) -> bool:
        """Whether to log the line ``key`` now: the first time, and then again each ``every_s`` seconds."""
        now_s = 0.0 if math.isinf(every_s) else self._now_s()
        logged_at_s = self._logged_at_s.get(key)
        if logged_at_s is not None and now_s - logged_at_s < every_s:
            return False
        self._logged_at_s.pop(key, None)
        self._logged_at_s[key] = now_s
        if len(self._logged_at_s) > self._most_keys:
            del self._logged_at_s[next(iter(self._logged_at_s))]
        return True

    def forget(self, key: Hashable = "") -> bool:
        """The trouble is over: the next line ``key`` is news. Return whether one was logged."""
        return self._logged_at_s.pop(key, None) is not None

    def clear(self) -> None:
        """Forget all keys: the next line of each is news."""
        self._logged_at_s.clear()


class LinePace:
    """Which of many lines are logged that others can bring about: so many at once, and then one each ``every_s``.

    It belongs to one thread. ``now_s`` returns monotonic seconds.
    """

    def __init__(self, now_s: Callable[[], float], at_once: int, every_s: float = 1.0) -> None:
        self._now_s = now_s
        self._at_once = at_once
        self._every_s = every_s
        #: How many may be logged, and when that was so.
        self._room, self._at_s = float(at_once), now_s()
        #: How many were left out since they were told of, and when that was.
        self._left_out, self._told_s = 0, -math.inf

    def may_log(self) -> bool:
        """Whether to log a line now; if not, it counts as left out."""
        now_s = self._now_s()
        self._room = min(self._at_once, self._room + (now_s - self._at_s) / self._every_s)
        self._at_s = now_s
        if self._room < 1.0:
            self._left_out += 1
            return False
        self._room -= 1.0
        return True

    def take_left_out(self) -> int:
        """How many lines to tell of that were left out; 0 also if some were told of less than ``every_s`` ago."""
        if not self._left_out or self._now_s() - self._told_s < self._every_s:
            return 0
        count, self._left_out, self._told_s = self._left_out, 0, self._now_s()
        return count
