"""Who waits for a slot, in which order, and whom to ask for one. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from omni_discovery.balancing.policies import Task

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
