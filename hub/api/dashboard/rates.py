"""Rates and quantiles of the last seconds, from two readings of counters that only grow. Pure."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from hub.api.dashboard.model import Spread
from hub.metrics import HubCounts, Tally

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The seconds that rates are taken over.
WINDOW_S: Final = 15.0
#: Outcomes of requests that nobody has failed.
OK, CANCELLED = "ok", "cancelled"


def quantile(before: Tally, after: Tally, part: float) -> float | None:
    """The quantile of what was observed between two readings, interpolated within its bucket; None if nothing was.

    What lies in the first bucket is said to be its upper bound, and what lies in the last, which has none, its lower.
    """
    counts = tuple(_growth(before, after))
    if not counts or counts[-1] <= 0:
        return None
    wanted, low_s, below = part * counts[-1], 0.0, 0.0
    for bound_s, count in zip(after.bounds, counts, strict=True):
        if count >= wanted:
            if bound_s == after.bounds[0]:
                return bound_s
            if bound_s == after.bounds[-1]:
                return low_s
            return low_s + (bound_s - low_s) * (wanted - below) / (count - below)
        low_s, below = bound_s, count
    return low_s


def _growth(before: Tally, after: Tally) -> Iterator[float]:
    """How many observations were at most each bound between two readings."""
    earlier = before.counts or (0.0,) * len(after.counts)
    return (now - then for then, now in zip(earlier, after.counts, strict=True))


class RateWindow:
    """Readings of the last ``WINDOW_S`` seconds. Moments are monotonic."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, HubCounts]] = deque()

    def __repr__(self) -> str:
        return f"RateWindow({len(self._readings)} readings, {self.length_s:.1f} s)"

    def add(self, now_s: float, counts: HubCounts) -> None:
        """Take in a reading. After a pause of more than the window the ones before it say nothing of now."""
        if self._readings and now_s - self._readings[-1][0] > WINDOW_S:
            self._readings.clear()
        self._readings.append((now_s, counts))
        while self._readings[0][0] < now_s - WINDOW_S:
            self._readings.popleft()

    @property
    def length_s(self) -> float:
        """The time between the first reading and the last; 0 for fewer than two."""
        return self._readings[-1][0] - self._readings[0][0] if self._readings else 0.0

    @property
    def latest(self) -> HubCounts:
        """The last reading."""
        return self._readings[-1][1] if self._readings else HubCounts()

    def stage(self, stage_id: int, part: str) -> Spread:
        """How often a part of a stage ended, and how long it took."""
        return self._spread(self._first.stages.get((stage_id, part)), self.latest.stages.get((stage_id, part)))

    def requests(self) -> Spread:
        """How often requests ended well, and how long they took."""
        return self._spread(self._first.request, self.latest.request)

    def first_output(self) -> Spread:
        """How often answers began, and how long that took."""
        return self._spread(self._first.first_output, self.latest.first_output)

    def failed_per_s(self) -> float | None:
        """How many requests a second failed or were refused; None if that is not known yet."""
        if not self.length_s:
            return None
        return (failed_in(self.latest) - failed_in(self._first)) / self.length_s

    @property
    def _first(self) -> HubCounts:
        return self._readings[0][1] if self._readings else HubCounts()

    def _spread(self, before: Tally | None, after: Tally | None) -> Spread:
        if not self.length_s:
            return Spread()
        before, after = before or Tally(), after or Tally()
        grown = tuple(_growth(before, after))
        rate = (grown[-1] if grown else 0.0) / self.length_s
        return Spread(per_s=rate, p50_s=quantile(before, after, 0.5), p99_s=quantile(before, after, 0.99))


def failed_in(counts: HubCounts) -> float:
    """How many requests had failed or were refused by then."""
    return sum(count for outcome, count in counts.outcomes.items() if outcome not in (OK, CANCELLED))
