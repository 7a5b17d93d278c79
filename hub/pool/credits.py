"""Credit requests: to which replicas a pool sends them, for how many credits, how often.

``CreditStarved`` tracks the replicas that lack only a credit, and that a pick would prefer. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from hub.pool.entry import Entry

#: Credit requests are open to so many replicas at one time,
_ASKED_AT_ONCE: Final = 16
#: and are repeated, to the next replicas, after so long,
_ASK_AGAIN_S: Final = 0.05
#: or after so long, where more picks wait than credits were requested for, and none of them will wait for long.
_ASK_AGAIN_SOON_S: Final = 0.005


class CreditStarved:
    """Replicas with free slots for which this hub has no credit, and which are better than others that it has one for.

    A local replica is better than a distant one (``labels``), and of two replicas the one with more weight and less
    load for its weight (``weights``). Where labels and weights are alike no replica is tracked, at no cost.
    """

    def __init__(self, *, labels: bool, weights: bool) -> None:
        self._labels, self._weights = labels, weights
        self._local: dict[str, Entry] = {}
        self._heavy: dict[str, Entry] = {}
        #: The least weight of any replica so far.
        self._lightest = inf
        #: Whether any replica can be better than another; never where labels and weights are alike.
        self.is_active = labels

    def __bool__(self) -> bool:
        return bool(self._local or self._heavy)

    def note_weight(self, weight: float) -> None:
        """Note a weight from a replica's record; replicas are tracked from the second unlike weight on."""
        differs = self._lightest not in (inf, weight)
        self._lightest = min(self._lightest, weight)
        if differs and self._weights:
            self.is_active = True

    def update(self, entry: Entry, *, is_free: bool) -> None:
        """Track an entry after a change, while active; ``is_free``: this hub can send to it now."""
        lacks_credit = entry.pickable and not is_free and not entry.send_queue_full_until_s
        has_slots = lacks_credit and entry.own_load() < entry.capacity
        _keep(self._local, entry, has_slots and self._labels and entry.is_local)
        _keep(self._heavy, entry, has_slots and self._weights and entry.info.weight > self._lightest)

    def addrs(self) -> tuple[str, ...]:
        """The replicas to ask for a credit, so that a pick need not take a worse one."""
        return tuple(self._local or self._heavy)

    def free_slots(self) -> int:
        """How many more requests the tracked replicas could run."""
        return sum(entry.capacity - entry.own_load() for entry in (self._local or self._heavy).values())

    def has_better(self, chosen: Entry, avoid: Collection[str] = ()) -> bool:
        """Whether a replica that lacks only a credit is better than ``chosen``, which has one."""
        if not chosen.is_local and any(_is_usable(entry, avoid) for entry in self._local.values()):
            return True
        return any(_is_usable(entry, avoid) and _outweighs(entry, chosen) for entry in self._heavy.values())


def _keep(entries: dict[str, Entry], entry: Entry, is_in: bool) -> None:
    if is_in:
        entries[entry.addr] = entry
    elif entries:
        entries.pop(entry.addr, None)


def _is_usable(entry: Entry, avoid: Collection[str]) -> bool:
    return entry.addr not in avoid and not entry.health.is_blocked


def _outweighs(entry: Entry, chosen: Entry) -> bool:
    if entry.info.weight <= chosen.info.weight or entry.is_local < chosen.is_local:
        return False
    return entry.own_load() / (entry.capacity * entry.weight) < chosen.own_load() / (chosen.capacity * chosen.weight)


@dataclass(frozen=True, slots=True)
class CreditRequest:
    """Ask the replica at ``addr`` for credits for ``waiting`` picks; 0 withdraws the request before."""

    addr: str
    waiting: int
    oldest_wait_s: float


class CreditRequester:
    """Requests credits of up to 16 replicas at a time, in turn, while picks wait."""

    def __init__(self) -> None:
        #: The replicas with an open credit request, by address.
        self._asked: tuple[str, ...] = ()
        self._asked_at_s = 0.0
        #: How many picks waited when the open requests were made.
        self._asked_for = 0
        self._start = 0

    @property
    def has_asked(self) -> bool:
        """Whether a credit request is open."""
        return bool(self._asked)

    def is_due(self, now_s: float, waiting: int, *, hurry: bool = False) -> bool:
        """Whether ``due`` may return anything; ``hurry``: the picks that wait now do not wait for long."""
        if self._asked and waiting:
            return now_s >= self._again_s(waiting, hurry=hurry)
        return bool(self._asked or waiting)

    def due(
        self, now_s: float, waiting: int, oldest_wait_s: float, addrs: Sequence[str], *, hurry: bool = False
    ) -> list[CreditRequest]:
        """The requests to send now. ``addrs`` are the replicas that give credits."""
        if not self.is_due(now_s, waiting, hurry=hurry):
            return []
        chosen = self._next_addrs(addrs) if waiting else ()
        still_asked = set(chosen)
        requests = [CreditRequest(addr, 0, 0.0) for addr in self._asked if addr not in still_asked]
        if chosen:
            # Each replica gets a part of the request, so that all together lend about as many credits as picks wait.
            part = -(-waiting // len(chosen))
            requests += [CreditRequest(addr, part, oldest_wait_s) for addr in chosen]
        self._asked, self._asked_at_s, self._asked_for = chosen, now_s, waiting
        return requests

    def next_s(self, waiting: int, replicas: int, *, hurry: bool = False) -> float | None:
        """When ``due`` returns requests, with so many replicas that give credits: 0.0 is now, None is never."""
        if self._asked:
            return self._again_s(waiting, hurry=hurry) if waiting else 0.0
        return 0.0 if waiting and replicas else None

    def _again_s(self, waiting: int, *, hurry: bool) -> float:
        return self._asked_at_s + (_ASK_AGAIN_SOON_S if hurry and waiting > self._asked_for else _ASK_AGAIN_S)

    def _next_addrs(self, addrs: Sequence[str]) -> tuple[str, ...]:
        if len(addrs) <= _ASKED_AT_ONCE:
            return tuple(addrs)
        start = self._start % len(addrs)
        self._start = start + _ASKED_AT_ONCE
        return tuple((*addrs[start:], *addrs[:start])[:_ASKED_AT_ONCE])
