"""The picks of one stage that wait for a free slot: in which order they are served, and when they fail. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from omni_discovery.errors import StageUnavailableError

if TYPE_CHECKING:
    from hub.pool.entry import Binding
    from omni_discovery.balancing.base import Task

#: How long a pick waits for a credit of the best replica before it takes another that has one.
MAX_WAIT_FOR_BEST_S: Final = 0.1

TokenT = TypeVar("TokenT")


@dataclass(slots=True, eq=False)
class Waiter(Generic[TokenT]):
    """One pick that found no free slot. ``token`` is the caller's, ``arrived_s`` monotonic."""

    request_id: str
    task: Task
    affinity_request_id: str | None
    avoid: Collection[str]
    priority: int
    arrived_s: float
    token: TokenT
    number: int = field(default=0, init=False)
    is_waiting: bool = field(default=False, init=False)
    #: Whether it still waits for the best replica, though it could have another.
    prefers_best: bool = True


class PriorityQueue(Generic[TokenT]):
    """Waiters by (priority, arrival); the lower priority number goes first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Waiter[TokenT]]] = []
        self._arrivals: deque[Waiter[TokenT]] = deque()
        self._number = 0
        #: How many wait.
        self.count = 0
        #: Those that must not go to some replicas, by number: they fail once no other replica is left.
        self.avoiding: dict[int, Waiter[TokenT]] = {}

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        return f"PriorityQueue({self.count} waiting, {len(self.avoiding)} avoiding replicas)"

    def add(self, waiter: Waiter[TokenT]) -> None:
        """Append a waiter that has just arrived."""
        if max(len(self._arrivals), len(self._heap)) > 2 * self.count + 64:
            self._drop_served()
        self._number += 1
        waiter.number = self._number
        self._arrivals.append(waiter)
        self.put_back(waiter)

    def pop(self) -> Waiter[TokenT] | None:
        """Take out the next waiter; None if the queue is empty."""
        while self._heap:
            waiter = heappop(self._heap)[2]
            if waiter.is_waiting:
                self.discard(waiter)
                return waiter
        return None

    def put_back(self, waiter: Waiter[TokenT]) -> None:
        """Return a popped waiter that no free slot fitted to its old position."""
        heappush(self._heap, (waiter.priority, waiter.number, waiter))
        waiter.is_waiting = True
        self.count += 1
        if waiter.avoid:
            self.avoiding[waiter.number] = waiter

    def discard(self, waiter: Waiter[TokenT]) -> None:
        """Remove a waiter. Idempotent."""
        if waiter.is_waiting:
            waiter.is_waiting = False
            self.count -= 1
            self.avoiding.pop(waiter.number, None)

    def oldest(self) -> Waiter[TokenT] | None:
        """The waiter that arrived first; None if the queue is empty."""
        while self._arrivals and not self._arrivals[0].is_waiting:
            self._arrivals.popleft()
        return self._arrivals[0] if self._arrivals else None

    def oldest_wait_s(self, now_s: float) -> float:
        """How long the waiter that arrived first has waited; 0 if the queue is empty."""
        oldest = self.oldest()
        return 0.0 if oldest is None else max(0.0, now_s - oldest.arrived_s)

    def _drop_served(self) -> None:
        self._arrivals = deque(waiter for waiter in self._arrivals if waiter.is_waiting)
        self._heap = [(waiter.priority, waiter.number, waiter) for waiter in self._arrivals]
        heapify(self._heap)


class PendingPick(Protocol):
    """Gets the result of a pick that waits. An asyncio.Future has this form."""

    def done(self) -> bool:
        """Whether it has its result, or was cancelled."""

    def set_result(self, result: Binding, /) -> Any:
        """The pick was served."""

    def set_exception(self, exception: Exception, /) -> Any:
        """The pick has failed."""


class Picker(Protocol):
    """The part of a pool that its WaitQueue uses."""

    @property
    def free_count(self) -> int:
        """How many replicas have a free slot and are in an index."""

    @property
    def ejected_free_count(self) -> int:
        """How many replicas have a free slot and are ejected."""

    @property
    def pickable_version(self) -> int:
        """Bumped whenever a replica becomes pickable."""

    @property
    def unavailable_since_s(self) -> float | None:
        """Since when no replica can take work, monotonic; None while one can."""

    @property
    def starved_slots(self) -> int | None:
        """How many slots the best replicas have that lack only a credit of this hub; None if there are no such."""

    def pick(
        self,
        request_id: str,
        task: Task,
        affinity_request_id: str | None = None,
        avoid: Collection[str] = (),
        *,
        may_wait: bool = False,
    ) -> Binding | None:
        """Choose a replica and bind the request to it; None if no replica suits."""

    def all_avoided(self, avoid: Collection[str]) -> bool:
        """Whether some replica can take work, and every one that can is in ``avoid``."""

    def only_ejected_left(self, avoid: Collection[str]) -> bool:
        """Whether every replica that can take work is in ``avoid`` or ejected."""

    def why_absent(self) -> str:
        """Why the replicas that can't take work are not picked, as text."""


#: How long the causes in an error count for the next errors, in seconds.
_CAUSES_S: Final = 0.2


class WaitQueue:
    """Serves the waiting picks of one pool, so that no pick waits while a slot that it can use is free."""

    def __init__(self, stage_id: int, picker: Picker, timeout_s: float) -> None:
        self._stage_id = stage_id
        self._picker = picker
        self._timeout_s = timeout_s
        self.waiters: PriorityQueue[PendingPick] = PriorityQueue()
        #: The pool's ``pickable_version`` when all waiters were last tried: until it grows, none can be served.
        self._tried_version = -1
        #: Why the replicas that can't take work are not picked, and when that was last asked, monotonic.
        self._causes = "", float("-inf")

    def __len__(self) -> int:
        return self.waiters.count

    def __repr__(self) -> str:
        return f"WaitQueue({self.waiters})"

    def add(self, waiter: Waiter[PendingPick]) -> None:
        """Queue a pick that found no slot; where the best replicas have no slots for it, it may be served at once."""
        self.waiters.add(waiter)
        if self._picker.free_count and self._surplus() > 0:
            self._tried_version = -1
            self.serve()

    def serve(self) -> None:
        """Give every free slot to the next waiter that can use it."""
        waiters, picker = self.waiters, self._picker
        if not waiters.count or picker.pickable_version == self._tried_version:
            return
        unserved: list[Waiter[PendingPick]] = []
        surplus = self._surplus()
        while picker.free_count and (waiter := waiters.pop()) is not None:
            if waiter.token.done():
                continue
            binding = self._try(waiter, may_wait=waiter.prefers_best and surplus <= 0)
            surplus -= 1
            if binding is not None:
                waiter.token.set_result(binding)
            elif not waiter.token.done():
                unserved.append(waiter)
        for waiter in unserved:
            waiters.put_back(waiter)
        if picker.ejected_free_count and waiters.avoiding:
            self._serve_from_ejected()
        self._tried_version = picker.pickable_version

    def recheck(self) -> None:
        """Replicas have come or gone: fail the waiters that no other replica is left for, and try all others again."""
        for waiter in list(self.waiters.avoiding.values()):
            if self._picker.all_avoided(waiter.avoid):
                self._fail(waiter, self.all_avoided_error())
        self._tried_version = -1
        self.serve()

    def stop_preferring(self, waiter: Waiter[PendingPick]) -> None:
        """Let a waiter take any replica: it has waited MAX_WAIT_FOR_BEST_S for the best."""
        waiter.prefers_best = False
        if self._picker.free_count:
            self._tried_version = -1
            self.serve()

    def time_out(self, waiter: Waiter[PendingPick], now_s: float) -> float | None:
        """Fail a waiter if no replica could be picked for the pick timeout; else return the seconds to the next check.

        None if it waits no more.
        """
        if waiter.token.done():
            return None
        left_s = self._timeout_s
        since_s = self._picker.unavailable_since_s
        if since_s is not None:
            left_s -= now_s - max(since_s, waiter.arrived_s)
        if left_s > 0:
            return left_s
        self._fail(waiter, self.unavailable_error(now_s))
        return None

    def unavailable_error(self, now_s: float) -> StageUnavailableError:
        """The error of a pick that no replica could serve for the pick timeout."""
        causes, at_s = self._causes
        # The picks of a burst time out together.
        if not 0 <= now_s - at_s < _CAUSES_S:
            causes, _ = self._causes = self._picker.why_absent(), now_s
        text = f"no UP replica for stage {self._stage_id} after {self._timeout_s:.1f}s ({causes})"
        return StageUnavailableError(self._stage_id, text)

    def all_avoided_error(self) -> StageUnavailableError:
        """The error of a pick that has to avoid every replica that can take work."""
        text = f"every replica of stage {self._stage_id} that can take work has failed this request"
        return StageUnavailableError(self._stage_id, text)

    @property
    def needs_ejected(self) -> bool:
        """Whether a waiter avoids every replica but the ejected ones."""
        return any(self._picker.only_ejected_left(waiter.avoid) for waiter in self.waiters.avoiding.values())

    @property
    def all_prefer_best(self) -> bool:
        """Whether all waiters still wait for the best replicas, and those lack only a credit of this hub."""
        if self._picker.starved_slots is None or self.waiters.avoiding:
            return False
        oldest = self.waiters.oldest()
        return oldest is None or oldest.prefers_best

    def _serve_from_ejected(self) -> None:
        """An ejected replica is better than to wait for the ejection's end where all others are to be avoided."""
        picker = self._picker
        for waiter in sorted(self.waiters.avoiding.values(), key=lambda each: (each.priority, each.number)):
            if not picker.ejected_free_count:
                return
            if waiter.token.done() or not picker.only_ejected_left(waiter.avoid):
                continue
            binding = self._try(waiter, may_wait=False)
            if binding is not None:
                self.waiters.discard(waiter)
                waiter.token.set_result(binding)

    def _try(self, waiter: Waiter[PendingPick], *, may_wait: bool) -> Binding | None:
        try:
            return self._picker.pick(
                waiter.request_id, waiter.task, waiter.affinity_request_id, waiter.avoid, may_wait=may_wait
            )
        except Exception as error:  # noqa: BLE001 - a third party's policy: its error is the waiter's
            self._fail(waiter, error)
            return None

    def _surplus(self) -> int:
        """How many waiters the best replicas have no slots for."""
        starved_slots = self._picker.starved_slots
        return 0 if starved_slots is None else self.waiters.count - starved_slots

    def _fail(self, waiter: Waiter[PendingPick], error: Exception) -> None:
        self.waiters.discard(waiter)
        if not waiter.token.done():
            waiter.token.set_exception(error)
