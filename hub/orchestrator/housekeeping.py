"""Housekeeping: requests credits for waiting picks, and runs the timers of each pool and of the membership."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from omni_discovery.log_once import LogOnce

if TYPE_CHECKING:
    from hub.pool.credits import CreditRequest
    from hub.pool.stage_pool import StagePool
    from hub.pool.versions import Pools
    from hub.replicas.membership import Membership
    from hub.replicas.stage_client import StageClient

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TimersDue:
    """The deadline of a pool has come; of the membership if ``pool`` is None."""

    pool: StagePool | None


class Housekeeping:
    """Part of the orchestrator's task. A pool announces its own deadlines: none is looked at without a reason.

    ``post`` brings what is due back into the task.
    """

    def __init__(self, pools: Pools, membership: Membership, post: Callable[[TimersDue], None]) -> None:
        self._membership = membership
        self._post = post
        #: One timer at most for each pool, and one of the membership under None.
        self._timers: dict[StagePool | None, asyncio.TimerHandle] = {}
        #: When the membership's timer is due, monotonic.
        self._membership_due_s: float | None = None
        #: The pools whose credit requests are due, the one that was due first in front.
        self._credit_pools: dict[StagePool, None] = {}
        #: By stage, replica and epoch whose client raised.
        self._log_once = LogOnce()
        self._closed = False
        pools.watch_pools(self._watch_pool)

    def run_timers(self, due: TimersDue) -> None:
        """Run the timers that are due: those of pools, of the membership, and credit requests."""
        if due.pool is None:
            self._membership_due_s = None
            self.review_membership()
        else:
            due.pool.core.run_timers(time.monotonic())
            self._request_credits(due.pool)

    def review_membership(self) -> None:
        """A session has changed, or time has passed: replicas that are served without a record may have to go."""
        self._membership.review_members()
        self.follow_membership()

    def follow_membership(self) -> None:
        """A view or a review may have changed when the membership is to be reviewed next."""
        due_s = self._membership.next_review_s
        if due_s != self._membership_due_s:
            self._membership_due_s = due_s
            self._set_timer(None, due_s)

    def close(self) -> None:
        """Cancel all timers, and set none any more. Idempotent."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _watch_pool(self, pool: StagePool) -> None:
        pool.core.watch_pool(partial(self._set_timer, pool), partial(self._want_credits, pool))

    def _set_timer(self, pool: StagePool | None, due_s: float | None) -> None:
        timer = self._timers.pop(pool, None)
        if timer is not None:
            timer.cancel()
        if due_s is not None and not self._closed:
            delay_s = max(0.0, due_s - time.monotonic())
            self._timers[pool] = asyncio.get_running_loop().call_later(delay_s, self._post, TimersDue(pool))

    def _want_credits(self, pool: StagePool) -> None:
        """Request credits once all picks of this turn wait."""
        if self._closed:
            return
        if not self._credit_pools:
            asyncio.get_running_loop().call_soon(self._request_wanted_credits)
        self._credit_pools[pool] = None

    def _request_wanted_credits(self) -> None:
        pools, self._credit_pools = list(self._credit_pools), {}
        if self._closed:
            return
        for pool in pools:
            self._request_credits(pool)

    def _request_credits(self, pool: StagePool) -> None:
        for request in pool.core.credit_requests(time.monotonic()):
            client = self._membership.clients.get(request.addr)
            if client is not None:
                self._want_credits_of(client, request)

    def _want_credits_of(self, client: StageClient, request: CreditRequest) -> None:
        try:
            client.want_credits(request.waiting, request.oldest_wait_s)
        except Exception:
            # A bug in a third party's client must not end the requests to all other replicas.
            info = client.info
            if self._log_once.should((info.stage_id, info.replica_id, info.epoch)):
                text = "credits.bug replica=%s epoch=%d: its client can't request credits"
                logger.exception(text, info.name, info.epoch)
