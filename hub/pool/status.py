"""StageStatus: how many replicas of a stage can take work, why the others can't, and whether it fails. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from hub.pool.outliers import OutlierState
from omni_discovery.records.health import MOST_REASON, ReplicaTrouble, TroubleKind
from omni_discovery.records.schema import ReplicaStatus
from omni_discovery.text import one_line

if TYPE_CHECKING:
    from hub.pool.entry import Entry

#: Characters that are shown of the reason in a replica's record, or of another cause.
_REASON_CHARS: Final = 200
#: Replicas whose causes are looked at, and causes that are named: anybody may have put thousands into the registry.
_MOST_LOOKED_AT: Final = 256
_MOST_CAUSES: Final = 8
#: The phase of a replica whose engine sleeps.
ASLEEP_PHASE: Final = "asleep"
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
class StageStatus:
    """The counts of a stage's replicas: listed by the registry, and able to take work now."""

    stage_id: int
    registered: int
    pickable: int
    #: Why the others can't take work; empty if all can.
    why_absent: str = ""
    failures: FailureStreak = NO_FAILURES


def why_absent(entries: Iterable[Entry]) -> str:
    """The number of registered replicas and the causes why some can't take work; empty if all can."""
    listed = [entry for entry in entries if entry.listed]
    absent = [entry for entry in listed if not entry.pickable]
    if not listed:
        return "none is registered"
    if not absent:
        return ""
    causes = Counter(map(cause_absent, absent[:_MOST_LOOKED_AT])).most_common(_MOST_CAUSES)
    others = len(absent) - sum(count for _, count in causes)
    named = [f"{count} {cause}" for cause, count in causes] + [f"{others} for other reasons"] * bool(others)
    return f"{len(listed)} registered: {', '.join(named)}"


def cause_absent(entry: Entry) -> str:
    """Why a listed replica can't take work, as text."""
    info = entry.info
    if info.status is not ReplicaStatus.UP:
        names = {ReplicaStatus.ERROR: "with an error", ReplicaStatus.DOWN: "going down"}
        # The record of a sleeping replica has the status STARTING until it is awake.
        is_asleep = info.status is ReplicaStatus.STARTING and info.phase == ASLEEP_PHASE
        text = ASLEEP_PHASE if is_asleep else names.get(info.status, str(info.status))
        is_loading = info.status is ReplicaStatus.STARTING and info.phase not in ("", ASLEEP_PHASE, "ready", text)
        phase = info.phase + (f" {_tens(info.progress)} %" if info.progress > 0 else "")
        details = [phase] * is_loading + [info.reason[:_REASON_CHARS]] * bool(info.reason)
        return f"{text} ({'; '.join(details)})" if details else text
    if entry.refused:
        return f"refused ({entry.refused[:_REASON_CHARS]})"
    if info.cordoned:
        return "cordoned"
    if info.weight <= 0:
        return "of weight 0"
    return f"unusable ({entry.unusable[:_REASON_CHARS]})" if entry.unusable else "without a session"


def _tens(progress: float) -> int:
    """Progress from 0 to 1 as per cent, in tens: each change of the text is a line of the log."""
    return 10 * int(10 * min(1.0, progress))


#: A new replica may take so long, in seconds, to get its first session.
_FIRST_SESSION_S: Final = 3.0


#: So many troubles of one kind are told of a pool.
_MOST_OF_KIND: Final = 64


class Troubles(NamedTuple):
    """What is told of replicas in trouble, and how many more there are."""

    shown: list[ReplicaTrouble]
    more: int = 0


def troubles_of(entries: Iterable[Entry], *, is_panic: bool, now_s: float, wall_s: float) -> Troubles:
    """The registered replicas that are ejected, or that don't answer though they are up by their record.

    ``now_s`` is monotonic, ``wall_s`` the same moment by the wall clock; with ``is_panic`` ejections are ignored.
    """
    found: list[ReplicaTrouble] = []
    counts: Counter[TroubleKind] = Counter()

    def add(entry: Entry, kind: TroubleKind, **fields: Any) -> None:
        counts[kind] += 1
        if counts[kind] <= _MOST_OF_KIND:
            found.append(_trouble(entry, kind, **fields))

    for entry in entries:
        if not (entry.listed and entry.info.status is ReplicaStatus.UP):
            continue
        health = entry.health
        if entry.unusable:
            add(entry, TroubleKind.UNUSABLE, reason=entry.unusable)
        elif not entry.answers and (entry.down_reason or now_s - entry.down_since_s >= _FIRST_SESSION_S):
            since = wall_s - (now_s - entry.down_since_s)
            add(entry, TroubleKind.NO_SESSION, since=since, reason=entry.down_reason)
        elif health.state is not OutlierState.FINE:
            is_over = health.state is OutlierState.PROBED
            add(
                entry,
                TroubleKind.PROBED if is_over else TroubleKind.EJECTED,
                since=wall_s - (now_s - health.ejected_at_s),
                until=0.0 if is_over else wall_s + health.until_s - now_s,
                reason=health.reason,
                is_picked=is_panic,
            )
    return Troubles(found, counts.total() - len(found))


#: A replica is slow that takes so many times as long as the median of the others of its stage, and so many seconds
#: longer; counted for those that have served so many requests, the last within so many seconds.
_SLOW_TIMES: Final = 3.0
_SLOW_BY_S: Final = 0.1
_SLOW_SERVED: Final = 5
_SLOW_WINDOW_S: Final = 300.0


def slow_ones(entries: Iterable[Entry], now_s: float) -> list[ReplicaTrouble]:
    """The replicas that take several times as long for a request as the others of their stage."""
    known = [
        entry
        for entry in entries
        if entry.listed and entry.served >= _SLOW_SERVED and now_s - entry.served_at_s <= _SLOW_WINDOW_S
    ]
    known.sort(key=lambda entry: entry.mean_service_s)
    found = []
    for index, entry in enumerate(known):
        mean_s, usual_s = entry.mean_service_s, _median_beside(known, index)
        if mean_s >= _SLOW_TIMES * usual_s and mean_s - usual_s >= _SLOW_BY_S:
            reason = f"its requests take {mean_s:.2g} s each, those of the other replicas of its stage {usual_s:.2g} s"
            found.append(_trouble(entry, TroubleKind.SLOW, reason=reason, is_picked=True))
    return found


def _median_beside(entries: Sequence[Entry], index: int) -> float:
    """The median time of service of sorted entries but the one at ``index``; infinite where there is no other."""
    count = len(entries) - 1
    if not count:
        return inf

    def mean_at(place: int) -> float:
        return entries[place + (place >= index)].mean_service_s

    return (mean_at((count - 1) // 2) + mean_at(count // 2)) / 2


def _trouble(entry: Entry, kind: TroubleKind, **fields: Any) -> ReplicaTrouble:
    info = entry.info
    fields["reason"] = one_line(fields["reason"][:MOST_REASON])
    return ReplicaTrouble(
        stage_id=info.stage_id,
        replica_id=info.replica_id,
        epoch=info.epoch,
        kind=kind,
        host=info.host,
        pid=info.pid,
        **fields,
    )
