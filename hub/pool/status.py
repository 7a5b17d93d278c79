"""StageStatus: how many replicas of a stage can take work, and why the others can't. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from omni_discovery.records.schema import ReplicaStatus

if TYPE_CHECKING:
    from hub.pool.entry import Entry

#: Characters that are shown of the reason in a replica's record.
_REASON_CHARS: Final = 200
#: The phase of a replica whose engine sleeps.
_ASLEEP: Final = "asleep"


@dataclass(frozen=True, slots=True)
class StageStatus:
    """The counts of a stage's replicas: listed by the registry, and able to take work now."""

    stage_id: int
    registered: int
    pickable: int
    #: Why the others can't take work; empty if all can.
    why_absent: str = ""


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
        is_loading = info.status is ReplicaStatus.STARTING and info.phase not in ("", _ASLEEP, "ready", text)
        details = [info.phase] * is_loading + [info.reason[:_REASON_CHARS]] * bool(info.reason)
        return f"{text} ({'; '.join(details)})" if details else text
    if entry.refused:
        return f"refused ({entry.refused})"
    if info.cordoned:
        return "cordoned"
    if info.weight <= 0:
        return "of weight 0"
    return f"unusable ({entry.unusable})" if entry.unusable else "without a session"
