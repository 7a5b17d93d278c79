"""How far a client is behind what is made for it, and what the replicas that make it are told of that. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hub.request.events import ClientPace, Pause

if TYPE_CHECKING:
    from hub.request.machine import RequestBody
    from hub.request.state import StageRun


class Marks:
    """A client is behind when half of either bound waits for it, and until no more than a quarter of both does."""

    def __init__(self, max_outputs: int, max_bytes: int) -> None:
        self.high_outputs, self._high_bytes = max(1, max_outputs // 2), max(1, max_bytes // 2)
        self._low_outputs, self._low_bytes = self.high_outputs // 2, self._high_bytes // 2
        self._is_behind = False

    def crossed(self, outputs: int, size_bytes: int) -> ClientPace | None:
        """So much waits now: what is new about the client's pace, if anything is."""
        if self._is_behind:
            is_behind = outputs > self._low_outputs or size_bytes > self._low_bytes
        else:
            is_behind = outputs >= self.high_outputs or size_bytes >= self._high_bytes
        if is_behind == self._is_behind:
            return None
        self._is_behind = is_behind
        return ClientPace(is_behind)


def keep_pace(body: RequestBody, pace: ClientPace) -> Sequence[Pause]:
    """The client's pace has changed: the replicas that make what it gets are told."""
    body.is_client_behind = pace.is_behind
    return [pause for run in body.runs.values() for pause in tell_pace(body, run)]


def tell_pace(body: RequestBody, run: StageRun, *, again: bool = False) -> Sequence[Pause]:
    """What the stage's replica is to be told if that is news to it; ``again``: what it was told may be lost.

    It answers, so that one that has nothing to say for a while is not taken for one that has lost the work. A stage
    that feeds another one is not told: it is held up by what that one does not take.
    """
    if not run.running or run.replica is None or run.stage_id not in body.plan.finals:
        return []
    is_news = bool(run.told_paused) != body.is_client_behind
    if not is_news and (run.told_paused is None or not again):
        return []
    run.told_paused = body.is_client_behind
    return [Pause(run.stage_id, run.attempt, run.replica, paused=body.is_client_behind)]
