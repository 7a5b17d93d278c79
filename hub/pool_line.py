"""PoolLine: the picks that wait for one stage, each a future that is served as soon as a slot frees."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Final

from hub.waiting import Waiter, WaitingLine
from omni_discovery.errors import StageUnavailableError

if TYPE_CHECKING:
    from hub.pool_core import PoolCore
    from omni_discovery.balancing.policies import Task
    from omni_discovery.records.schema import ReplicaInfo

    _Waiter = Waiter[asyncio.Future[ReplicaInfo]]

#: How long a request waits for a credit of the replica it should have, before it goes to another that has one.
_PATIENCE_S: Final = 0.1


class PoolLine:
    """Part of StagePool, on the hub's loop."""

    def __init__(self, stage_id: int, core: PoolCore, timeout_s: float, now: Callable[[], float]) -> None:
        self._stage_id = stage_id
        self._core = core
        self._timeout_s = timeout_s
        self._now = now
        #: Whoever is in it can use none of the free slots: each event that frees one serves it at once.
        self._line: WaitingLine[asyncio.Future[ReplicaInfo]] = WaitingLine()
        #: Since when nobody can be picked, full or not; None while somebody can.
        self._nobody_since_s: float | None = now()
        #: ``core.opened`` when all who wait were last tried: until it grows, there is nothing for any of them.
        self._tried_at = -1

    def __len__(self) -> int:
        return len(self._line)

    def oldest_wait_s(self, now_s: float) -> float:
        """How long the one that came first has waited; 0 if nobody waits."""
        return self._line.oldest_wait_s(now_s)

    async def wait(
        self, request_id: str, task: Task, affinity_request_id: str | None, avoid: Collection[str], priority: int
    ) -> ReplicaInfo:
        """Wait for a slot; the request is bound when this returns. Raise StageUnavailableError."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[ReplicaInfo] = loop.create_future()
        waiter = Waiter(request_id, task, affinity_request_id, avoid, priority, self._now(), future)
        self._line.add(waiter)
        if self._core.free_count and self._surplus() > 0:
            self._tried_at = -1
            self.serve()
        timer = loop.call_later(self._timeout_s, self._time_up, waiter)
        patience = loop.call_later(_PATIENCE_S, self._patience_over, waiter)
        try:
            return await future
        except asyncio.CancelledError:
            # It was served a moment ago, and nobody will send it. By now the request may have been picked for again.
            served = future.done() and not future.cancelled() and future.exception() is None
            if served and self._core.waited(request_id):
                self._core.release(request_id, unsent=True)
                self.serve()
            raise
        finally:
            self._line.discard(waiter)
            timer.cancel()
            patience.cancel()

    def changed(self) -> None:
        """Somebody may have come or gone: serve, and tell those for whom nobody is left."""
        if self._core.pickable_count():
            self._nobody_since_s = None
        elif self._nobody_since_s is None:
            self._nobody_since_s = self._now()
        if self._line:
            for waiter in list(self._line.choosy.values()):
                if self._core.all_avoided(waiter.avoid):
                    self._end(waiter, self.all_avoided())
            self._tried_at = -1
            self.serve()

    def serve(self) -> None:
        """Give every free slot to whose turn it is, and no more turns than there are slots."""
        line, core = self._line, self._core
        if not line or core.opened == self._tried_at:
            return
        unsuited: list[_Waiter] = []
        surplus = self._surplus()
        while core.free_count and (waiter := line.pop()) is not None:
            if waiter.token.done():
                continue
            found = self._try(waiter, patient=waiter.patient and surplus <= 0)
            surplus -= 1
            if found is not None:
                waiter.token.set_result(found)
            elif not waiter.token.done():
                unsuited.append(waiter)
        for waiter in unsuited:
            line.put_back(waiter)
        if core.reserve_count and line.choosy:
            self._serve_from_reserve()
        self._tried_at = core.opened

    @property
    def needs_spared(self) -> bool:
        """Whether somebody waits for whom none is left but those who are spared for their failures."""
        return any(self._core.only_spared(waiter.avoid) for waiter in self._line.choosy.values())

    def _serve_from_reserve(self) -> None:
        """Nobody waits for an ejection to end where all others are to be avoided."""
        core = self._core
        for waiter in sorted(self._line.choosy.values(), key=lambda each: (each.priority, each.number)):
            if not core.reserve_count:
                return
            if waiter.token.done() or not core.only_spared(waiter.avoid):
                continue
            found = self._try(waiter, patient=False)
            if found is not None:
                self._line.discard(waiter)
                waiter.token.set_result(found)

    def _try(self, waiter: _Waiter, *, patient: bool) -> ReplicaInfo | None:
        core = self._core
        try:
            return core.pick_waited(
                waiter.request_id, waiter.task, waiter.affinity_request_id, waiter.avoid, patient=patient
            )
        except Exception as error:  # noqa: BLE001 - a third party's policy: whoever waits is told
            self._end(waiter, error)
            return None

    @property
    def only_patient(self) -> bool:
        """Whether all who wait may still have the best there is, and somebody that good lacks only a credit."""
        if not self._core.withheld or self._line.choosy:
            return False
        return self._line.oldest_wait_s(self._now()) < _PATIENCE_S

    def _surplus(self) -> int:
        """How many of those who wait could not have the best there is even if they were patient."""
        return len(self._line) - self._core.withheld.room() if self._core.withheld else 0

    def _patience_over(self, waiter: _Waiter) -> None:
        waiter.patient = False
        if self._core.free_count:
            self._tried_at = -1
            self.serve()

    def all_avoided(self) -> StageUnavailableError:
        """What a request is told whose every replica is to be avoided."""
        text = f"every replica of stage {self._stage_id} that can take work has failed this request"
        return StageUnavailableError(self._stage_id, text)

    def _time_up(self, waiter: _Waiter) -> None:
        """Fail a waiter if nobody could be picked for long enough; else look again when that may be so."""
        if waiter.token.done():
            return
        left_s = self._timeout_s
        if self._nobody_since_s is not None:
            left_s -= self._now() - max(self._nobody_since_s, waiter.arrived_s)
        if left_s > 0:
            timer = asyncio.get_running_loop().call_later(left_s, self._time_up, waiter)
            waiter.token.add_done_callback(lambda _: timer.cancel())
            return
        text = f"no UP replica for stage {self._stage_id} after {self._timeout_s:.1f}s ({self._core.why_absent()})"
        self._end(waiter, StageUnavailableError(self._stage_id, text))

    def _end(self, waiter: _Waiter, error: Exception) -> None:
        self._line.discard(waiter)
        if not waiter.token.done():
            waiter.token.set_exception(error)
