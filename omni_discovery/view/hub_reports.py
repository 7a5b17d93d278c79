"""HubReports: what the hubs say in their beats about the replicas of a view, for the commands that show them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final

import msgspec

from omni_discovery.records.health import HubHealth, ReplicaTrouble, TroubleKind, bounded
from omni_discovery.text import one_line

if TYPE_CHECKING:
    from omni_discovery.records.beat import BeatRecord
    from omni_discovery.view.replica_map import ReplicaId
    from omni_discovery.view.table import View

#: Hubs that a text names; the others are counted.
_MOST_NAMES: Final = 4
_WORDS: Final[Mapping[str, str]] = {
    TroubleKind.EJECTED: "ejected",
    TroubleKind.PROBED: "on probation",
    TroubleKind.NO_SESSION: "no session",
    TroubleKind.UNUSABLE: "unusable",
    TroubleKind.LOST: "lost",
    TroubleKind.SLOW: "slow",
}


@dataclass(frozen=True, slots=True)
class SeenTrouble:
    """A replica in trouble, as ``hubs`` see it: the report of the first of them."""

    trouble: ReplicaTrouble
    hubs: tuple[str, ...]

    @property
    def word(self) -> str:
        """The trouble in a word or two, for a table."""
        return _WORDS.get(self.trouble.kind, one_line(self.trouble.kind)[:20])

    def describe(self, now_s: float) -> str:
        """The trouble as a sentence without the replica's name; ``now_s`` is wall-clock seconds."""
        trouble, hubs = self.trouble, _names(self.hubs)
        reason = f": {one_line(trouble.reason)}" if trouble.reason else ""
        picked = ", yet picked since too few others are left" if trouble.is_picked else ""
        since = f" since {_moment(trouble.since, now_s)}" if trouble.since else ""
        match trouble.kind:
            case TroubleKind.EJECTED:
                return f"ejected until {_moment(trouble.until, now_s)} by {hubs}{picked}{reason}"
            case TroubleKind.PROBED:
                return (
                    f"on probation at {hubs}{picked}, its next request shows whether it works; it was ejected{reason}"
                )
            case TroubleKind.NO_SESSION:
                return f"up by its record, but without a session with {hubs}{since}{reason}"
            case TroubleKind.LOST:
                process = f" (process {trouble.pid} on {trouble.host})" if trouble.pid else ""
                return f"lost at {_moment(trouble.since, now_s)}{process} and not replaced, says {hubs}{reason}"
            case _:
                return f"{self.word} for {hubs}{since}{reason}"


@dataclass(frozen=True, slots=True)
class HubReports:
    """The reports of the hubs that are registered and not revoked.

    ``troubles`` are of replicas of the view, by id; ``lost`` of lives that are gone. ``health`` has the reports by hub;
    ``silent`` are the hubs that don't report, since they are of an older release or have not beaten yet. ``more`` is
    how many replicas in trouble the hubs did not name.
    """

    troubles: Mapping[ReplicaId, tuple[SeenTrouble, ...]]
    lost: tuple[SeenTrouble, ...]
    health: Mapping[str, HubHealth]
    silent: tuple[str, ...]
    more: int = 0
    #: What waits for each stage, and was refused for it lately, in all hubs; None where a hub does not say that.
    loads: Mapping[int, tuple[int, int]] | None = None
    #: How many requests each stage failed lately, in all hubs; None where a hub does not say that.
    failed: Mapping[int, int] | None = None

    def lines(self, now_s: float) -> Iterator[str]:
        """One line for each trouble, beginning with the replica's name, and one for what is not known."""
        for _, seen in sorted(self.troubles.items()):
            yield from (f"{each.trouble.name} is {each.describe(now_s)}" for each in seen)
        yield from (f"{each.trouble.name} was {each.describe(now_s)}" for each in self.lost)
        if self.more:
            yield f"{self.more} more replicas are in trouble; see /ready and the logs of the hubs"
        if self.silent:
            yield f"{_names(self.silent)} {'does' if len(self.silent) == 1 else 'do'} not report ejections: unknown"


def read_reports(view: View, beats: Mapping[str, BeatRecord]) -> HubReports:
    """Merge the reports in some beats; those about lives that are not in the view any more count as out of date."""
    health: dict[str, HubHealth] = {}
    live = sorted(view.hubs.keys() - view.revoked)
    for hub_id in live:
        report = beats[hub_id].health if hub_id in beats else msgspec.UNSET
        if isinstance(report, HubHealth):
            health[hub_id] = bounded(report)
    merged: dict[tuple[int, int, int, str], tuple[ReplicaTrouble, list[str]]] = {}
    for hub_id, report in health.items():
        for trouble in report.troubles:
            key = (trouble.stage_id, trouble.replica_id, trouble.epoch, trouble.kind)
            merged.setdefault(key, (trouble, []))[1].append(hub_id)
    troubles: dict[ReplicaId, tuple[SeenTrouble, ...]] = {}
    lost: list[SeenTrouble] = []
    for stage_id, replica_id, epoch, kind in sorted(merged):
        first, hubs = merged[stage_id, replica_id, epoch, kind]
        seen = SeenTrouble(first, tuple(hubs))
        info = view.replicas.get((stage_id, replica_id))
        is_here = info is not None and info.epoch == epoch
        if kind == TroubleKind.LOST:
            # The hubs' beats may be older than the view: a replica that is back is not lost.
            if not is_here:
                lost.append(seen)
        elif is_here:
            troubles[stage_id, replica_id] = (*troubles.get((stage_id, replica_id), ()), seen)
    silent = tuple(hub_id for hub_id in live if hub_id not in health)
    more = max((each.more for each in health.values()), default=0)
    is_whole = bool(health) and not silent
    failed = _failed_by_stage(health.values()) if is_whole else None
    return HubReports(
        troubles, tuple(lost), health, silent, more, _loads_by_stage(health.values()) if is_whole else None, failed
    )


def _loads_by_stage(reports: Iterable[HubHealth]) -> dict[int, tuple[int, int]] | None:
    """Added up once: a stage that asks for its own would look at all that each hub says."""
    sums: dict[int, tuple[int, int]] = {}
    for report in reports:
        if isinstance(report.loads, msgspec.UnsetType):
            return None
        for load in report.loads:
            if load.stage_id is not None:
                waiting, refused = sums.get(load.stage_id, (0, 0))
                sums[load.stage_id] = waiting + load.waiting, refused + load.refused
    return sums


def _failed_by_stage(reports: Iterable[HubHealth]) -> dict[int, int]:
    sums: Counter[int] = Counter()
    for report in reports:
        for each in report.failures:
            if each.stage_id is not None:
                sums[each.stage_id] += each.failed
    return dict(sums)


def _names(hubs: tuple[str, ...]) -> str:
    shown = ", ".join(hubs[:_MOST_NAMES])
    more = f" and {len(hubs) - _MOST_NAMES} more" if len(hubs) > _MOST_NAMES else ""
    return f"{'hub' if len(hubs) == 1 else 'hubs'} {shown}{more}"


def _moment(at_s: float, now_s: float) -> str:
    """The time of the day, with the date where that is another one."""
    try:
        then, today = datetime.fromtimestamp(at_s).astimezone(), datetime.fromtimestamp(now_s).astimezone()
    except (ValueError, OverflowError, OSError):
        return "an unknown time"
    return f"{then:%H:%M:%S}" if then.date() == today.date() else f"{then:%Y-%m-%d %H:%M:%S}"
