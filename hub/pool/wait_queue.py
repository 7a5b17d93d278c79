"""PoolLine: the picks that wait for one stage, each a future that is served as soon as a slot frees.

Who waits for a slot, in which order, and whom to ask for one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from omni_discovery.errors import StageUnavailableError

if TYPE_CHECKING:
    from hub.pool.core import PoolCore
    from omni_discovery.balancing.policies import Task
    from omni_discovery.records.schema import ReplicaInfo

_ASKED_AT_ONCE: Final = 16
_ASK_AGAIN_S: Final = 0.05
#: As soon as that, where more wait than were asked for and time presses.
_HURRY_S: Final = 0.005

TokenT = TypeVar("TokenT")


@dataclass(slots=True, eq=False)
class Waiter(Generic[TokenT]):
    """One pick that found no slot. ``token`` is the driver's."""

    request_id: str
    task: Task
    affinity_request_id: str | None
    avoid: Collection[str]
    priority: int
    arrived_s: float
    token: TokenT
    number: int = field(default=0, init=False)
    waits: bool = field(default=False, init=False)
    #: Whether it is still to have the best replica there is, and waits though it could have another.
    patient: bool = True


class WaitingLine(Generic[TokenT]):
    """Waiters by (priority, arrival); the lower priority number goes first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Waiter[TokenT]]] = []
        self._arrivals: deque[Waiter[TokenT]] = deque()
        self._number = 0
        self._count = 0
        #: Those that some replicas are no good for; they may have to be told that nobody is left.
        self.choosy: dict[int, Waiter[TokenT]] = {}

    def __len__(self) -> int:
        return self._count

    def add(self, waiter: Waiter[TokenT]) -> None:
        """It waits from now on."""
        if max(len(self._arrivals), len(self._heap)) > 2 * self._count + 64:
            self._forget_the_served()
        self._number += 1
        waiter.number = self._number
        self._arrivals.append(waiter)
        self.put_back(waiter)

    def pop(self) -> Waiter[TokenT] | None:
        """Take out whose turn it is; None if nobody waits."""
        while self._heap:
            waiter = heappop(self._heap)[2]
            if waiter.waits:
                self.discard(waiter)
                return waiter
        return None

    def put_back(self, waiter: Waiter[TokenT]) -> None:
        """It was its turn, and nothing fitted: it waits on in its old place."""
        heappush(self._heap, (waiter.priority, waiter.number, waiter))
        waiter.waits = True
        self._count += 1
        if waiter.avoid:
            self.choosy[waiter.number] = waiter

    def discard(self, waiter: Waiter[TokenT]) -> None:
        """It does not wait any more. Fine if it did not."""
        if waiter.waits:
            waiter.waits = False
            self._count -= 1
            self.choosy.pop(waiter.number, None)

    def oldest_wait_s(self, now_s: float) -> float:
        """How long the one that came first has waited; 0 if nobody waits."""
        while self._arrivals and not self._arrivals[0].waits:
            self._arrivals.popleft()
        return max(0.0, now_s - self._arrivals[0].arrived_s) if self._arrivals else 0.0

    def _forget_the_served(self) -> None:
        self._arrivals = deque(waiter for waiter in self._arrivals if waiter.waits)
        self._heap = [(waiter.priority, waiter.number, waiter) for waiter in self._arrivals]
        heapify(self._heap)


@dataclass(frozen=True, slots=True)
class Want:
    """Ask the replica at ``addr`` for as many credits; 0 takes back what was asked."""

    addr: str
    waiting: int
    oldest_wait_s: float


class Asking:
    """Asks up to 16 replicas at a time for credits, others each time, while somebody waits."""

    def __init__(self) -> None:
        #: Whom we have asked and not told that nobody waits any more.
        self._asked: tuple[str, ...] = ()
        self._asked_at_s = 0.0
        #: How many waited then.
        self._asked_for = 0
        self._start = 0

    @property
    def asked(self) -> bool:
        """Whether somebody was asked and not told that nobody waits any more."""
        return bool(self._asked)

    def is_due(self, now_s: float, waiting: int, *, hurry: bool = False) -> bool:
        """Whether ``due`` may have something to say; ``hurry``: what waits now does not wait for long."""
        if self._asked and waiting:
            return now_s >= self._again_s(waiting, hurry=hurry)
        return bool(self._asked or waiting)

    def due(
        self, now_s: float, waiting: int, oldest_wait_s: float, addrs: Sequence[str], *, hurry: bool = False
    ) -> list[Want]:
        """What to tell whom now. ``addrs`` are those who give credits."""
        if not self.is_due(now_s, waiting, hurry=hurry):
            return []
        chosen = self._turn(addrs) if waiting else ()
        here = set(chosen)
        wants = [Want(addr, 0, 0.0) for addr in self._asked if addr not in here]
        if chosen:
            # Each is asked for its part: whoever frees first, what comes is about what is needed.
            part = -(-waiting // len(chosen))
            wants += [Want(addr, part, oldest_wait_s) for addr in chosen]
        self._asked, self._asked_at_s, self._asked_for = chosen, now_s, waiting
        return wants

    def next_s(self, waiting: int, givers: int, *, hurry: bool = False) -> float | None:
        """When ``due`` has something to say, with so many who give credits; None while nothing changes."""
        if self._asked:
            return self._again_s(waiting, hurry=hurry) if waiting else 0.0
        return 0.0 if waiting and givers else None

    def _again_s(self, waiting: int, *, hurry: bool) -> float:
        return self._asked_at_s + (_HURRY_S if hurry and waiting > self._asked_for else _ASK_AGAIN_S)

    def _turn(self, addrs: Sequence[str]) -> tuple[str, ...]:
        if len(addrs) <= _ASKED_AT_ONCE:
            return tuple(addrs)
        start = self._start % len(addrs)
        self._start = start + _ASKED_AT_ONCE
        return tuple((*addrs[start:], *addrs[:start])[:_ASKED_AT_ONCE])


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
        unsuited: list[Waiter[asyncio.Future[ReplicaInfo]]] = []
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

    def _try(self, waiter: Waiter[asyncio.Future[ReplicaInfo]], *, patient: bool) -> ReplicaInfo | None:
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

    def _patience_over(self, waiter: Waiter[asyncio.Future[ReplicaInfo]]) -> None:
        waiter.patient = False
        if self._core.free_count:
            self._tried_at = -1
            self.serve()

    def all_avoided(self) -> StageUnavailableError:
        """What a request is told whose every replica is to be avoided."""
        text = f"every replica of stage {self._stage_id} that can take work has failed this request"
        return StageUnavailableError(self._stage_id, text)

    def _time_up(self, waiter: Waiter[asyncio.Future[ReplicaInfo]]) -> None:
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

    def _end(self, waiter: Waiter[asyncio.Future[ReplicaInfo]], error: Exception) -> None:
        self._line.discard(waiter)
        if not waiter.token.done():
            waiter.token.set_exception(error)
