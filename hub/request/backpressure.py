"""Backpressure: which replicas are paused for a client that is behind its output. Pure.

When a client counts as behind, the watermarks of its OutputQueue decide.
"""

from __future__ import annotations

from collections.abc import Sequence

from hub.request.events import ClientBackpressure, Pause
from hub.request.state import RequestState, StageRun


def update_backpressure(state: RequestState, backpressure: ClientBackpressure) -> Sequence[Pause]:
    """The client has fallen behind or caught up: pause or resume the replicas that make its output."""
    state.is_client_behind = backpressure.is_behind
    return [pause for run in state.runs.values() for pause in pause_or_resume(state, run)]


def pause_or_resume(state: RequestState, run: StageRun, *, again: bool = False) -> Sequence[Pause]:
    """The Pause that the stage's replica needs, if it needs one; ``again``: the last one may be lost, so repeat it.

    The replica answers each, so that a silent paused replica is not mistaken for one that has lost the work. A stage
    that feeds another by pieces gets it, too: their window would hold it up, but it would keep its slot. One that hands
    over whole works on: it gives its slot back when it is done.
    """
    if not run.running or run.replica is None or not state.plan.keeps_pace(run.stage_id):
        return []
    is_change = bool(run.pause_sent) != state.is_client_behind
    if not is_change and (run.pause_sent is None or not again):
        return []
    run.pause_sent = state.is_client_behind
    return [Pause(run.stage_id, run.attempt, run.replica, paused=state.is_client_behind)]
