"""PacedRetries and RetryBudget: how fast work that may have run already is dispatched again.

Retries may be a share of live traffic, so that no retry storm feeds itself; a retry beyond the budget waits here.
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

#: The window over which live traffic is counted, in seconds.
_WINDOW_S: Final = 10.0


class RetryBudget:
    """Tokens for retries: ``share`` of one with each admitted request, and ``floor_per_s`` with time.

    A retry beyond the budget waits for a token; as the floor is above 0, every retry gets one in time. At most
    ``burst`` tokens are saved up, or ``share`` of the traffic in the window where that is more. All times are
    monotonic. Raise ValueError for a share outside 0 to 1, a floor that is not positive or a burst under 1.
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
        """Count an admitted request."""
        self._advance(now_s)
        self._traffic += 1.0
        self._tokens = min(self._limit, self._tokens + self._share)

    def delay_s(self, now_s: float, ahead: int = 0) -> float:
        """Seconds until a retry may go while ``ahead`` others wait before it; 0.0 is now.

        Requests that are admitted meanwhile make it less.
        """
        self._advance(now_s)
        missing = 1.0 + ahead - self._tokens
        # With some slack: a driver that wakes exactly then would find a token almost there, again and again.
        return 0.0 if missing <= 1e-9 else missing / self._floor_per_s

    def spend(self, now_s: float) -> bool:
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
    """A dispatch that waited for the retry budget may go."""

    request_id: str
    dispatch: ev.Dispatch


class PacedRetries:
    """Part of the orchestrator's task. First come, first served."""

    def __init__(self, post: Callable[[RetryDue], None]) -> None:
        self._budget = RetryBudget(time.monotonic())
        self._post = post
        #: By request and stage, oldest first: each has at most one dispatch.
        self._waiting: OrderedDict[tuple[str, int], RetryDue] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def admitted(self) -> None:
        """Count an admitted request: the budget grows by a share of it."""
        self._budget.admitted(time.monotonic())

    def is_free(self) -> bool:
        """Whether a retry that came now would leave at once."""
        return not self._waiting and self._budget.delay_s(time.monotonic()) == 0.0

    def may_go(self, request_id: str, dispatch: ev.Dispatch) -> bool:
        """Whether a retry may leave now; if not, it is posted as RetryDue once the budget has a token for it."""
        if not self._waiting and self._budget.spend(time.monotonic()):
            return True
        self._waiting[request_id, dispatch.stage_id] = RetryDue(request_id, dispatch)
        self._set_timer()
        return False

    def forget(self, request_id: str, stage_id: int) -> None:
        """Drop the stage's waiting retry, so that it uses no token. Does nothing for unknown ones."""
        self._waiting.pop((request_id, stage_id), None)

    def close(self) -> None:
        """Drop all waiting retries. Idempotent."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        if self._timer is None and self._waiting:
            delay_s = self._budget.delay_s(time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._post_due)

    def _post_due(self) -> None:
        self._timer = None
        while self._waiting and self._budget.spend(time.monotonic()):
            self._post(self._waiting.popitem(last=False)[1])
        self._set_timer()
