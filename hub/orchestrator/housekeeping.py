"""Tending: what the orchestrator does for its pools unasked: it asks for slots, and reviews them when time is due."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hub.pool.stage_pool import StagePool
from hub.replicas.membership import Membership


@dataclass(frozen=True, slots=True)
class ReviewDue:
    """The moment has come at which time alone changes who is served."""


class Tending:
    """Part of the orchestrator's task."""

    def __init__(self, pools: Iterable[StagePool], membership: Membership, post: Callable[[ReviewDue], None]) -> None:
        self._pools = pools
        self._membership = membership
        self._post = post
        self._look_is_due = False
        self._timer: asyncio.TimerHandle | None = None
        #: When the timer is due, monotonic.
        self._due_s: float | None = None

    def review(self) -> None:
        """Time has passed, or a session has changed."""
        self._membership.review_members()
        now_s = time.monotonic()
        for pool in self._pools:
            pool.review(now_s)

    def look(self) -> None:
        """A turn is over: ask for slots where requests wait, and see to it that the next review comes in time."""
        moments_s = [self._membership.next_review_s]
        for pool in self._pools:
            self._ask_for_credits(pool)
            moments_s += (pool.next_review_s, pool.next_wants_s)
        due_s = min((moment_s for moment_s in moments_s if moment_s is not None), default=None)
        if due_s == self._due_s:
            return
        self.close()
        self._due_s = due_s
        if due_s is not None:
            delay_s = max(0.0, due_s - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._time_out)

    def look_soon(self) -> None:
        """A pick is about to wait: look once it does."""
        if not self._look_is_due:
            self._look_is_due = True
            asyncio.get_running_loop().call_soon(self._look_now)

    def close(self) -> None:
        """No review comes any more. Idempotent."""
        self._due_s = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ask_for_credits(self, pool: StagePool) -> None:
        for want in pool.wants(time.monotonic()):
            client = self._membership.clients.get(want.addr)
            if client is not None:
                client.want_credits(want.waiting, want.oldest_wait_s)

    def _look_now(self) -> None:
        self._look_is_due = False
        self.look()

    def _time_out(self) -> None:
        self._timer = self._due_s = None
        self._post(ReviewDue())
