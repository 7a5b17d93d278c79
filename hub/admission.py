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


def refusal(stages: Iterable[StageLoad], bounds: Bounds, in_flight: int, timeout_s: float) -> Refusal | None:
    """Decide on one request with ``timeout_s`` to its deadline; None lets it in.

    A stage without any slot refuses nobody: its replicas may be starting, and the pick waits for them.
    """
    worst = max((_of_stage(stage, bounds, timeout_s) for stage in stages), key=_retry, default=None)
    if worst is not None:
        return worst
    if in_flight >= bounds.max_in_flight:
        return Refusal(f"{in_flight} requests are in flight, which is the bound of this hub", LEAST_RETRY_S)
    return None


def _of_stage(stage: StageLoad, bounds: Bounds, timeout_s: float) -> Refusal | None:
    if not stage.slots:
        return None
    share = stage.slots / max(1, bounds.live_hubs)
    waiting = max(0.0, stage.backlog - share)
    seconds_each = (stage.mean_service_s or 0.0) / share
    if waiting >= bounds.max_waiting:
        reason = f"{stage.backlog} requests are on their way to stage {stage.stage_id}, which runs {share:g} at a time"
        return Refusal(reason, _bounded((waiting - bounds.max_waiting + 1) * seconds_each))
    expected_s = waiting * seconds_each
    if expected_s > timeout_s:
        reason = f"stage {stage.stage_id} would begin in about {expected_s:.0f} s, after the request's {timeout_s:g} s"
        return Refusal(reason, _bounded(expected_s - timeout_s))
    return None


def _retry(found: Refusal | None) -> float:
    return -1.0 if found is None else found.retry_after_s


def _bounded(seconds: float) -> float:
    return min(MOST_RETRY_S, max(LEAST_RETRY_S, seconds))
