"""PacedRetries: dispatches that repeat work wait here while the retry budget has nothing for them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
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
    """Part of the orchestrator's task. First come, first served; one whose request has ended still takes its turn."""

    def __init__(self, post: Callable[[RetryDue], None]) -> None:
        self._budget = RetryBudget(time.monotonic())
        self._post = post
        self._waiting: deque[RetryDue] = deque()
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
        self._waiting.append(RetryDue(request_id, dispatch))
        self._set_timer()
        return False

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
            self._post(self._waiting.popleft())
        self._set_timer()
