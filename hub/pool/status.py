"""Why replicas of a stage can't take work, in words for whoever has to do something about it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from omni_discovery.records.schema import ReplicaStatus

if TYPE_CHECKING:
    from hub.pool.entry import Entry

#: Characters of what a replica says of itself.
_MOST_REASON: Final = 200
#: The phase of a replica whose engine sleeps.
_ASLEEP: Final = "asleep"


@dataclass(frozen=True, slots=True)
class StageStatus:
    """How many replicas a stage has: listed by the registry, and able to take work now."""

    stage_id: int
    registered: int
    pickable: int
    #: What keeps those back that can't take work; empty if nothing does.
    why_absent: str = ""


def why_absent(entries: Iterable[Entry]) -> str:
    """How many replicas are registered, and what keeps those back that can't be picked; empty if nothing does."""
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
        said = {ReplicaStatus.ERROR: "with an error", ReplicaStatus.DOWN: "going down"}
        # A sleeping replica is up again once it is awake; until then its record says that it is starting.
        is_asleep = info.status is ReplicaStatus.STARTING and info.phase == _ASLEEP
        text = _ASLEEP if is_asleep else said.get(info.status, str(info.status))
        return f"{text} ({info.reason[:_MOST_REASON]})" if info.reason else text
    if entry.refused:
        return f"refused ({entry.refused})"
    if info.cordoned:
        return "cordoned"
    if info.weight <= 0:
        return "of weight 0"
    return f"unusable ({entry.unusable})" if entry.unusable else "without a session"
