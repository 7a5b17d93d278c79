"""HealthReporter: puts together, once a second, what this hub reports of requests and replicas in its beat."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from hub.pool.status import slow_ones
from hub.replicas.lost import LostReplicas
from hub.request.recent import RecentRequests
from omni_discovery.records.health import MOST_TROUBLES, HubHealth, StageLoad, TroubleKind, UnreadAnswers

if TYPE_CHECKING:
    from hub.pool.versions import Pools

logger = logging.getLogger(__name__)

_PERIOD_S: Final = 1.0
#: Counts alone are announced so often at most, and the report so often at least: in a busy registry no other beat may
#: be due.
_COUNTS_PERIOD_S: Final = 5.0
_LONGEST_S: Final = 30.0
#: A client reads too slowly that has left something unread for so long. What is buffered on its way to it is read.
_UNREAD_S: Final = 10.0


def _ignore() -> None:
    return None


class HealthReporter:
    """Lives on the hub's loop, and tells the hub's registration when the report should be seen soon."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self.lost = LostReplicas()
        self.recent = RecentRequests()
        #: The report; replaced as a whole, so that any thread may read it.
        self.report = HubHealth()
        #: Called on the loop when the report has changed in a way that must not wait for the next beat.
        self.on_change: Callable[[], None] = _ignore
        #: Since when the oldest output of each request waits for its client, monotonic; infinity where none does.
        self.unread_since_s: Callable[[], Mapping[str, float]] = dict
        self._announced = HubHealth()
        self._announced_at_s = float("-inf")
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Report from now on, once a second."""
        self._timer = asyncio.get_running_loop().call_later(_PERIOD_S, self._on_timer)

    def close(self) -> None:
        """Stop. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def refresh(self, now_s: float, wall_s: float) -> None:
        """Make the report of this moment, which is ``now_s`` monotonic and ``wall_s`` by the wall clock."""
        of_pools = [pool.core.troubles(now_s, wall_s) for pool in self._pools]
        troubles = [trouble for each in of_pools for trouble in each.shown]
        troubles += self.lost.troubles(now_s, wall_s)
        for pool in self._pools:
            troubles += slow_ones(pool.core.members, now_s)
        # Records that no hub can use may be anybody's, in thousands: they hide no others.
        troubles.sort(key=lambda trouble: trouble.kind is TroubleKind.UNUSABLE)
        self.report = report = HubHealth(
            window_s=self.recent.window_s,
            requests=self.recent.requests(now_s),
            failures=self.recent.failures(now_s, wall_s),
            troubles=troubles[:MOST_TROUBLES],
            more=max(0, len(troubles) - MOST_TROUBLES) + sum(each.more for each in of_pools),
            loads=self._loads(now_s, wall_s),
            unread=self._unread(now_s, wall_s),
        )
        has_news, quiet_s = _names(report) != _names(self._announced), now_s - self._announced_at_s
        counts = (report.failed, report.loads) != (self._announced.failed, self._announced.loads)
        has_counts = counts and quiet_s >= _COUNTS_PERIOD_S
        if has_news or has_counts or quiet_s >= _LONGEST_S:
            self._announced, self._announced_at_s = report, now_s
            self.on_change()

    def _loads(self, now_s: float, wall_s: float) -> list[StageLoad]:
        """The stages that requests wait for or were refused for."""
        waiting: Counter[int | None] = Counter()
        for pool in self._pools:
            waiting[pool.stage_id] += len(pool.core.queue)
        refused = self.recent.refused(now_s)
        stages = sorted({*waiting, *refused}, key=lambda stage_id: -1 if stage_id is None else stage_id)
        return [
            StageLoad(
                stage_id=stage_id,
                waiting=waiting[stage_id],
                refused=refused[stage_id],
                refused_at=wall_s - self.recent.refused_s_ago(stage_id, now_s) if refused[stage_id] else 0.0,
            )
            for stage_id in stages
            if waiting[stage_id] or refused[stage_id]
        ]

    def _unread(self, now_s: float, wall_s: float) -> UnreadAnswers | msgspec.UnsetType:
        late = [since_s for since_s in self.unread_since_s().values() if now_s - since_s >= _UNREAD_S]
        return UnreadAnswers(count=len(late), since=wall_s - (now_s - min(late))) if late else msgspec.UNSET

    def _on_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_PERIOD_S, self._on_timer)
        try:
            self.refresh(time.monotonic(), time.time())
        except Exception:
            # Requests go on without a report.
            logger.exception("hub.health_not_reported")


def _names(report: HubHealth) -> tuple[object, ...]:
    """What an operator should see at once: which replicas are in which trouble, which stages fail, and slow clients."""
    troubles = {(each.stage_id, each.replica_id, each.epoch, each.kind, each.is_picked) for each in report.troubles}
    failing = frozenset(each.stage_id for each in report.failures)
    return frozenset(troubles), report.more, failing, isinstance(report.unread, UnreadAnswers)
