"""Whether one more request may come in, and when to come back if not. Pure.

The tightest stage of the request's path decides: what is still to pass through it, for the share of its slots that is
this hub's, at the pace at which it has served lately.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

#: Bounds of what a client is told to wait, in seconds.
LEAST_RETRY_S: Final = 1.0
MOST_RETRY_S: Final = 600.0
#: What a request is taken to need of a stage that has not served any yet.
_UNKNOWN_SERVICE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class StageLoad:
    """One stage of the path, as this hub sees it."""

    stage_id: int
    #: Unfinished requests of this hub that still need the stage.
    backlog: int
    #: The slots of all its replicas that can take work.
    slots: int
    #: How long it works on one request; None before the first.
    mean_service_s: float | None


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one hub lets in. ``live_hubs`` share the slots of every stage."""

    max_waiting: int
    max_in_flight: int
    live_hubs: int = 1


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not taken. ``retry_after_s`` is when one like it probably would be."""

    reason: str
    retry_after_s: float
    #: The stage that is full; None where it is the hub.
    stage_id: int | None = None
    #: Where a queue is full: how long until it has room for one more after that, and until all of it is served.
    seconds_each: float = 0.0
    most_s: float = MOST_RETRY_S


class Returns:
    """Tells each client that is turned away when there will be room for it, behind those that were told before it."""

    def __init__(self) -> None:
        #: When there will be room for the one that was told last, by stage; None is the hub itself.
        self._told_s: dict[int | None, float] = {}

    def retry_after_s(self, refused: Refusal, now_s: float) -> float:
        """The time to wait, in seconds."""
        if not refused.seconds_each:
            return refused.retry_after_s
        stage_id, soonest_s = refused.stage_id, now_s + refused.retry_after_s
        at_s = max(soonest_s, self._told_s.get(stage_id, soonest_s) + refused.seconds_each)
        # Some of those that were told never come back, and by then all that waits now will have been served.
        at_s = self._told_s[stage_id] = min(at_s, max(soonest_s, now_s + refused.most_s))
        return _bounded(at_s - now_s)


def refusal(stages: Iterable[StageLoad], bounds: Bounds, in_flight: int, timeout_s: float) -> Refusal | None:
    """Decide on one request with ``timeout_s`` to its deadline; None lets it in.

    A stage without any slot refuses nobody: its replicas may be starting, and the pick waits for them.
    """
    path = tuple(stages)
    worst = max((_of_stage(stage, bounds, timeout_s) for stage in path), key=_retry, default=None)
    if worst is not None:
        return worst
    if in_flight >= bounds.max_in_flight:
        each_s = max((_seconds_each(stage, bounds) for stage in path if stage.slots), default=0.0)
        reason = f"{in_flight} requests are in flight, which is the bound of this hub"
        return Refusal(reason, LEAST_RETRY_S, None, each_s, in_flight * each_s)
    return None


def _of_stage(stage: StageLoad, bounds: Bounds, timeout_s: float) -> Refusal | None:
    if not stage.slots:
        return None
    share = stage.slots / max(1, bounds.live_hubs)
    waiting = max(0.0, stage.backlog - share)
    if waiting >= bounds.max_waiting:
        reason = f"{stage.backlog} requests are on their way to stage {stage.stage_id}, which runs {share:g} at a time"
        each_s = _seconds_each(stage, bounds)
        retry_s = _bounded((waiting - bounds.max_waiting + 1) * each_s)
        return Refusal(reason, retry_s, stage.stage_id, each_s, waiting * each_s)
    expected_s = waiting * (stage.mean_service_s or 0.0) / share
    if expected_s > timeout_s:
        reason = f"stage {stage.stage_id} would begin in about {expected_s:.0f} s, after the request's {timeout_s:g} s"
        return Refusal(reason, _bounded(expected_s - timeout_s))
    return None


def _seconds_each(stage: StageLoad, bounds: Bounds) -> float:
    """How long until this hub's share of the slots has served one more."""
    mean_s = _UNKNOWN_SERVICE_S if stage.mean_service_s is None else stage.mean_service_s
    return mean_s * max(1, bounds.live_hubs) / stage.slots


def _retry(found: Refusal | None) -> float:
    return -1.0 if found is None else found.retry_after_s


def _bounded(seconds: float) -> float:
    return min(MOST_RETRY_S, max(LEAST_RETRY_S, seconds))
