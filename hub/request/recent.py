"""RecentRequests: how many requests ended within the last minutes, and which stages failed how many of them. Pure."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from math import inf
from typing import Final

from omni_discovery.records.health import StageFailures

#: Seconds that are counted together.
_PERIOD_S: Final = 10.0
#: Kinds of errors that a report names for one stage.
_MOST_KINDS: Final = 4


@dataclass(slots=True)
class _Period:
    """The ends of requests within one period."""

    began_at_s: float
    requests: int = 0
    #: By stage, None where none was at fault, and type of error.
    failed: Counter[tuple[int | None, str]] = field(default_factory=Counter)
    #: By stage, None where the hub had no room.
    refused: Counter[int | None] = field(default_factory=Counter)
    last_at_s: dict[int | None, float] = field(default_factory=dict)


class RecentRequests:
    """Counts over about ``window_s`` seconds. Moments are monotonic."""

    def __init__(self, window_s: float = 300.0) -> None:
        self.window_s = window_s
        self._periods: deque[_Period] = deque()
        #: When the last request was refused, by stage.
        self._refused_at_s: dict[int | None, float] = {}

    def __repr__(self) -> str:
        return f"RecentRequests({sum(each.requests for each in self._periods)} requests)"

    def count_end(self, now_s: float) -> None:
        """A request has ended, whatever its outcome."""
        self._now(now_s).requests += 1

    def count_failure(self, stage_id: int | None, kind: str, now_s: float) -> None:
        """It had failed by the fault of a stage."""
        period = self._now(now_s)
        period.failed[stage_id, kind] += 1
        period.last_at_s[stage_id] = now_s

    def count_refusal(self, stage_id: int | None, now_s: float) -> None:
        """A request was refused for overload: of a stage, or None, of the hub."""
        self._now(now_s).refused[stage_id] += 1
        self._refused_at_s[stage_id] = now_s

    def refused_s_ago(self, stage_id: int | None, now_s: float) -> float:
        """How long ago the last request was refused for it; infinite if none was."""
        return now_s - self._refused_at_s.get(stage_id, -inf)

    def refused(self, now_s: float) -> Counter[int | None]:
        """How many requests were refused within the window, by stage."""
        self._forget_old(now_s)
        return sum((each.refused for each in self._periods), Counter())

    def requests(self, now_s: float) -> int:
        """How many requests ended within the window."""
        self._forget_old(now_s)
        return sum(each.requests for each in self._periods)

    def failures(self, now_s: float, wall_s: float) -> list[StageFailures]:
        """The failures within the window by stage; ``wall_s`` is ``now_s`` by the wall clock."""
        self._forget_old(now_s)
        counts: dict[int | None, Counter[str]] = {}
        last_at_s: dict[int | None, float] = {}
        for period in self._periods:
            for (stage_id, kind), count in period.failed.items():
                counts.setdefault(stage_id, Counter())[kind] += count
            last_at_s.update(period.last_at_s)
        return [
            StageFailures(
                stage_id=stage_id,
                failed=kinds.total(),
                kinds=dict(kinds.most_common(_MOST_KINDS)),
                last_at=wall_s - (now_s - last_at_s[stage_id]),
            )
            for stage_id, kinds in sorted(counts.items(), key=lambda item: -1 if item[0] is None else item[0])
        ]

    def _now(self, now_s: float) -> _Period:
        self._forget_old(now_s)
        if not self._periods or now_s >= self._periods[-1].began_at_s + _PERIOD_S:
            self._periods.append(_Period(now_s))
        return self._periods[-1]

    def _forget_old(self, now_s: float) -> None:
        while self._periods and now_s >= self._periods[0].began_at_s + self.window_s + _PERIOD_S:
            self._periods.popleft()
