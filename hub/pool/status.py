"""StageStatus: how many replicas of a stage can take work, why the others can't, and whether requests fail. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Final

from hub.pool.outliers import OutlierState
from omni_discovery.records.schema import ReplicaStatus

if TYPE_CHECKING:
    from hub.pool.entry import Entry
    from hub.pool.outliers import Outliers

#: Characters that are shown of the reason in a replica's record.
_REASON_CHARS: Final = 200
#: The phase of a replica whose engine sleeps.
_ASLEEP: Final = "asleep"
#: A stage fails once so many requests have failed in a row, and until none has failed for so long. The pause lets
#: requests in again, which show whether the stage works: a hub that is not ready may get none.
_FAILED_IN_A_ROW: Final = 5
_FAILING_FOR_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class FailureStreak:
    """The requests of a stage that ended with an error, all retries included, since it last served one."""

    count: int = 0
    #: When the last of them ended, monotonic.
    last_at_s: float = -inf
    #: The types of their errors, the newest last.
    kinds: tuple[str, ...] = ()

    def extended(self, kind: str, now_s: float) -> FailureStreak:
        """The streak with one more failure."""
        others = tuple(each for each in self.kinds if each != kind)
        return FailureStreak(self.count + 1, now_s, (*others, kind))

    def describe(self, now_s: float) -> str:
        """That the stage fails at the moment, as text; empty if it does not."""
        age_s = now_s - self.last_at_s
        if self.count < _FAILED_IN_A_ROW or age_s > _FAILING_FOR_S:
            return ""
        return f"its last {self.count} requests failed ({', '.join(self.kinds)}), the last {age_s:.0f} s ago"


NO_FAILURES: Final = FailureStreak()


@dataclass(frozen=True, slots=True)
class Ejection:
    """A replica that gets no new work for its failures, or that is on trial after that."""

    #: ``<stage>/<replica id>``.
    replica: str
    why: str
    #: When the ejection ends, monotonic; None: it has ended, and the next request is the trial.
    until_s: float | None
    #: Whether work goes there all the same, because too few other replicas are left.
    is_ignored: bool = False


def ejections_of(outliers: Outliers[Entry]) -> tuple[Ejection, ...]:
    """The ejected replicas of a pool, and those on trial, sorted by replica."""
    ejected = sorted(outliers.ejected.values(), key=lambda entry: entry.info.replica_id)
    return tuple(_ejection(entry, panics=outliers.panics) for entry in ejected)


def _ejection(entry: Entry, *, panics: bool) -> Ejection:
    info, health = entry.info, entry.health
    until_s = health.until_s if health.state is OutlierState.EJECTED else None
    return Ejection(f"{info.stage_id}/{info.replica_id}", health.why, until_s, panics)


@dataclass(frozen=True, slots=True)
class StageStatus:
    """The counts of a stage's replicas: listed by the registry, and able to take work now."""

    stage_id: int
    registered: int
    pickable: int
    #: Why the others can't take work; empty if all can.
    why_absent: str = ""
    ejected: tuple[Ejection, ...] = ()
    failures: FailureStreak = NO_FAILURES


def why_absent(entries: Iterable[Entry]) -> str:
    """The number of registered replicas and the causes why some can't take work; empty if all can."""
    listed = [entry for entry in entries if entry.listed]
    causes = Counter(_cause(entry) for entry in listed if not entry.pickable)
    if not listed:
        return "none is registered"
    if not causes:
        return ""
    return f"{len(listed)} registered: " + ", ".join(f"{count} {cause}" for cause, count in causes.most_common())


def _cause(entry: Entry) -> str:
    info = entry.info
    if info.status is not ReplicaStatus.UP:
        names = {ReplicaStatus.ERROR: "with an error", ReplicaStatus.DOWN: "going down"}
        # The record of a sleeping replica has the status STARTING until it is awake.
        is_asleep = info.status is ReplicaStatus.STARTING and info.phase == _ASLEEP
        text = _ASLEEP if is_asleep else names.get(info.status, str(info.status))
        return f"{text} ({info.reason[:_REASON_CHARS]})" if info.reason else text
    if entry.refused:
        return f"refused ({entry.refused})"
    if info.cordoned:
        return "cordoned"
    if info.weight <= 0:
        return "of weight 0"
    return f"unusable ({entry.unusable})" if entry.unusable else "without a session"
