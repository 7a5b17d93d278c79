"""Whether what processes hold grows with time: a line through the samples of each resource, and a bound. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

import msgspec

#: A series of fewer samples is not judged.
LEAST_SAMPLES: Final = 16


class Bound(msgspec.Struct, frozen=True):
    """How much a resource may grow by its line: ``most``, or ``share`` of what it is, whichever is more.

    The line goes through the least of ``around_s``, or of a quarter of the time, if that is shorter.
    """

    most: float
    share: float = 0.0
    unit: str = ""
    around_s: float = 0.0


#: By resource. Memory is what RSS may gain while caches, which are bounded, fill; the others count things. What malloc
#: keeps for some minutes behind a large request is no growth: a leak also lifts what memory comes back to.
BOUNDS: Final[Mapping[str, Bound]] = {
    "memory": Bound(4.0, 0.03, "MiB", around_s=300.0),
    "descriptors": Bound(8),
    "sockets": Bound(6),
    "threads": Bound(3),
    "tasks": Bound(6),
    "shared memory": Bound(1.0, 0.0, "MiB"),
    "processes": Bound(2),
    "keys in etcd": Bound(4),
}


class Fit(msgspec.Struct, frozen=True):
    """A line through one resource of one process, or of the whole site."""

    who: str
    what: str
    samples: int
    #: From the first sample of the line to the last.
    span_s: float
    median: float
    most: float
    #: What the line gains within the span, and how much of that is allowed.
    grown: float
    allowed: float

    @property
    def is_flat(self) -> bool:
        return self.grown <= self.allowed

    @property
    def per_hour(self) -> float:
        return self.grown * 3600.0 / self.span_s


def fit(who: str, what: str, points: Sequence[tuple[float, float]], least_span_s: float) -> Fit | None:
    """The line of these moments and values; None if they are too few or too close in time.

    Its slope is the median of those between each point of the first half and its counterpart in the second, so that
    what a fault adds for some seconds bends it little.
    """
    if len(points) < LEAST_SAMPLES or points[-1][0] - points[0][0] < least_span_s:
        return None
    half = (len(points) + 1) // 2
    lowest = _lowest(points, BOUNDS[what].around_s)
    pairs = zip(lowest, lowest[half:], strict=False)
    slope = median((late - early) / (late_s - early_s) for (early_s, early), (late_s, late) in pairs)
    values = [value for _, value in points]
    middle, span_s, bound = median(values), points[-1][0] - points[0][0], BOUNDS[what]
    return Fit(
        who=who,
        what=what,
        samples=len(points),
        span_s=span_s,
        median=middle,
        most=max(values),
        grown=slope * span_s,
        allowed=max(bound.most, bound.share * middle),
    )


def _lowest(points: Sequence[tuple[float, float]], around_s: float) -> list[tuple[float, float]]:
    """Each moment with the least value of those around it."""
    near_s = min(around_s, (points[-1][0] - points[0][0]) / 4) / 2
    return [(at_s, min(value for other_s, value in points if abs(other_s - at_s) <= near_s)) for at_s, _ in points]


def line_of(fit: Fit) -> str:
    """What is told of a resource that is not flat."""
    unit = f" {BOUNDS[fit.what].unit}".rstrip()
    return (
        f"{fit.who}: {fit.what} grew by {fit.grown:.1f}{unit} in {fit.span_s:.0f} s, from a median of "
        f"{fit.median:.1f}{unit}; {fit.allowed:.1f}{unit} are allowed"
    )
