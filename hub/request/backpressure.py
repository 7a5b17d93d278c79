"""Backpressure: when a client is too far behind its output, and which replicas are paused for it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hub.request.events import ClientBackpressure, Pause
from hub.request.state import RequestState, StageRun


class Watermarks:
    """High and low watermark of the output that waits for one client.

    A client is behind from half of ``max_outputs`` or half of ``max_bytes`` on, until no more than a quarter of both
    waits.
    """

    def __init__(self, max_outputs: int, max_bytes: int) -> None:
        self.high_outputs, self._high_bytes = max(1, max_outputs // 2), max(1, max_bytes // 2)
        self._low_outputs, self._low_bytes = self.high_outputs // 2, self._high_bytes // 2
        self._is_behind = False

    def crossed(self, outputs: int, size_bytes: int) -> ClientBackpressure | None:
        """Take the number and size of the outputs that wait now; return an event if a watermark was crossed."""
        if self._is_behind:
            is_behind = outputs > self._low_outputs or size_bytes > self._low_bytes
        else:
            is_behind = outputs >= self.high_outputs or size_bytes >= self._high_bytes
        if is_behind == self._is_behind:
            return None
        self._is_behind = is_behind
        return ClientBackpressure(is_behind)


def update_backpressure(state: RequestState, backpressure: ClientBackpressure) -> Sequence[Pause]:
    """The client has fallen behind or caught up: pause or resume the replicas that make its output."""
    state.is_client_behind = backpressure.is_behind
    return [pause for run in state.runs.values() for pause in pause_or_resume(state, run)]


def pause_or_resume(state: RequestState, run: StageRun, *, again: bool = False) -> Sequence[Pause]:
    """The Pause that the stage's replica needs, if it needs one; ``again``: the last one may be lost, so repeat it.

    The replica answers each, so that a silent paused replica is not mistaken for one that has lost the work. A stage
    whose output only feeds another stage gets none: the window of its hand-off holds it up.
    """
    if not run.running or run.replica is None or run.stage_id not in state.plan.finals:
        return []
    is_change = bool(run.pause_sent) != state.is_client_behind
    if not is_change and (run.pause_sent is None or not again):
        return []
    run.pause_sent = state.is_client_behind
    return [Pause(run.stage_id, run.attempt, run.replica, paused=state.is_client_behind)]
