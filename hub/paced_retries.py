"""PacedRetries: dispatches that repeat work wait here while the retry budget has nothing for them."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from hub import request_events as ev
from hub.retry_budget import RetryBudget


@dataclass(frozen=True, slots=True)
class RetryDue:
    """A repeated dispatch has its turn."""

    request_id: str
    dispatch: ev.Dispatch


class PacedRetries:
    """Part of the orchestrator's task. First come, first served."""

    def __init__(self, post: Callable[[RetryDue], None]) -> None:
        self._budget = RetryBudget(time.monotonic())
        self._post = post
        #: By request and stage: of each, one dispatch is out at most.
        self._waiting: OrderedDict[tuple[str, int], RetryDue] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def admitted(self) -> None:
        """A request came in: a share of it may be spent on retries."""
        self._budget.admitted(time.monotonic())

    def may_go(self, request_id: str, dispatch: ev.Dispatch) -> bool:
        """Whether a repeated dispatch may leave now; if not, it comes back through ``post``."""
        if not self._waiting and self._budget.take(time.monotonic()):
            return True
        self._waiting[request_id, dispatch.stage_id] = RetryDue(request_id, dispatch)
        self._set_timer()
        return False

    def forget(self, request_id: str, stage_id: int) -> None:
        """Nobody wants the stage's retry any more: it takes no turn from those behind it. Unknown ones are fine."""
        self._waiting.pop((request_id, stage_id), None)

    def close(self) -> None:
        """Let nobody have a turn any more. Idempotent."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        if self._timer is None and self._waiting:
            delay_s = self._budget.delay_s(time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._give_turns)

    def _give_turns(self) -> None:
        self._timer = None
        while self._waiting and self._budget.take(time.monotonic()):
            self._post(self._waiting.popitem(last=False)[1])
        self._set_timer()
