"""PacedRetries: dispatches that repeat work wait here while the retry budget has nothing for them.

How fast work that may have run is done again: a share of live traffic, so that no retry storm feeds itself.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from hub.request import events as ev

#: Over how long live traffic is counted: so much of it may be retried at once.
_WINDOW_S: Final = 10.0


class RetryBudget:
    """Tokens for retries: ``share`` of one with each admitted request, and ``floor_per_s`` with time.

    A retry beyond the budget waits its turn; as the floor is above 0, each turn comes. At most ``burst`` tokens are
    saved up, or ``share`` of the traffic of the last seconds where that is more. All times are monotonic.
    """

    def __init__(self, now_s: float, share: float = 0.2, floor_per_s: float = 10.0, burst: float = 20.0) -> None:
        if not (0 <= share <= 1 and floor_per_s > 0 and burst >= 1):
            raise ValueError(f"share {share}, floor {floor_per_s} per second and burst {burst} make no budget")
        self._share = share
        self._floor_per_s = floor_per_s
        self._burst = burst
        self._tokens = burst
        #: Requests admitted lately; older ones count less and less.
        self._traffic = 0.0
        self._updated_at_s = now_s

    def admitted(self, now_s: float) -> None:
        """A request came in."""
        self._advance(now_s)
        self._traffic += 1.0
        self._tokens = min(self._limit, self._tokens + self._share)

    def delay_s(self, now_s: float, ahead: int = 0) -> float:
        """How long a retry has to wait while ``ahead`` others wait before it; 0.0 is now.

        It may be less by then, if requests come in.
        """
        self._advance(now_s)
        missing = 1.0 + ahead - self._tokens
        # A hair of slack, or a driver that wakes exactly then would find a token almost there, over and over.
        return 0.0 if missing <= 1e-9 else missing / self._floor_per_s

    def take(self, now_s: float) -> bool:
        """Spend a token on a retry that goes now; False, and nothing is spent, if there is none."""
        if self.delay_s(now_s) > 0.0:
            return False
        self._tokens = max(0.0, self._tokens - 1.0)
        return True

    @property
    def _limit(self) -> float:
        return max(self._burst, self._share * self._traffic)

    def _advance(self, now_s: float) -> None:
        passed_s = max(0.0, now_s - self._updated_at_s)
        self._updated_at_s += passed_s
        self._traffic *= math.exp(-passed_s / _WINDOW_S)
        self._tokens = min(self._limit, self._tokens + passed_s * self._floor_per_s)


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
