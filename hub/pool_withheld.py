"""Replicas that have room though this hub has no credit there: others hold them, and may have no use for them. Pure."""

from __future__ import annotations

from collections.abc import Collection
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hub.pool_entry import Entry


class Withheld:
    """Whom a pick would rather have than one with a credit, had it a credit there.

    That is who is near where others are far (``labels``), and who was given more weight than another and has less to
    do for it (``weights``). Where places and weights are alike it knows of nobody, and costs nothing.
    """

    def __init__(self, *, labels: bool, weights: bool) -> None:
        self._labels, self._weights = labels, weights
        self._near: dict[str, Entry] = {}
        self._heavy: dict[str, Entry] = {}
        #: The least weight that any replica was ever given.
        self._lightest = inf

    def __bool__(self) -> bool:
        return bool(self._near or self._heavy)

    def place(self, entry: Entry, *, is_free: bool) -> None:
        """Note an entry after a change; ``is_free``: this hub has a credit for it."""
        weight = entry.info.weight
        self._lightest = min(self._lightest, weight)
        lacks = entry.pickable and entry.gated and not is_free and not entry.clogged_until_s and weight > 0
        has_room = lacks and _load(entry) < entry.capacity
        _keep(self._near, entry, has_room and self._labels and entry.near)
        _keep(self._heavy, entry, has_room and self._weights and weight > self._lightest)

    def addrs(self) -> tuple[str, ...]:
        """Whom to ask for a credit, so that a pick need not make do with another."""
        return tuple(self._near or self._heavy)

    def room(self) -> int:
        """How many more those could run."""
        return sum(entry.capacity - _load(entry) for entry in (self._near or self._heavy).values())

    def has_better(self, chosen: Entry, avoid: Collection[str] = ()) -> bool:
        """Whether somebody who lacks only a credit should rather have the work that ``chosen`` has a credit for."""
        if self._labels and not chosen.near and any(_suits(entry, avoid) for entry in self._near.values()):
            return True
        return any(_suits(entry, avoid) and _outweighs(entry, chosen) for entry in self._heavy.values())


def _keep(entries: dict[str, Entry], entry: Entry, is_in: bool) -> None:
    if is_in:
        entries[entry.addr] = entry
    elif entries:
        entries.pop(entry.addr, None)


def _suits(entry: Entry, avoid: Collection[str]) -> bool:
    return entry.addr not in avoid and not entry.health.blocked


def _outweighs(entry: Entry, chosen: Entry) -> bool:
    if entry.info.weight <= chosen.info.weight or entry.near < chosen.near:
        return False
    return _load(entry) / (entry.capacity * entry.weight) < _load(chosen) / (chosen.capacity * chosen.weight)


def _load(entry: Entry) -> int:
    """What the replica has to do as far as this hub knows; nothing is guessed of other hubs."""
    own = len(entry.in_flight)
    return max(own, entry.reported + own - entry.then)
