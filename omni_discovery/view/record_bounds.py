"""RecordBounds: how many records of one kind a view holds, and which, where there are more. Pure.

Whoever may write one record may write any number, and each costs memory in every process that watches. Those with a
lease are read before those without, the first that came first. One that comes takes nobody's place who has a lease,
and gets the place of one that goes. A record that grows, or gets a lease, comes anew: else many small old ones could
wait until younger ones are in service, and grow then.

A reader that has seen no earlier state goes by the registry alone: by the revision of a record's creation, or of its
last write where it takes more than its share of the memory. So all that begin to watch at one moment read the same.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from omni_discovery.kv import KeyValue
from omni_discovery.records.sizes import MAX_PARTS, MAX_VALUE_BYTES, count_parts


@dataclass(frozen=True, slots=True)
class Most:
    """How many records are read, and what they may take of memory: each has a share, a larger one counts as several."""

    records: int
    memory_bytes: int

    def shares(self, value: bytes) -> int:
        """As how many records one counts."""
        share_bytes = self.memory_bytes // self.records
        return max(1, -(-memory_bytes(value) // share_bytes))


#: Records of replicas in one namespace. The memory is by an estimate that is too high for nearly all: a small record
#: takes 1.8 kB, measured, and one of four thousand numbers with names 560 kB, which counts as 700 kB.
MOST_REPLICAS: Final = Most(10_000, 512 << 20)
#: Records of hubs. One has less than 1 kB.
MOST_HUBS: Final = Most(1024, 64 << 20)
_EACH_BYTE: Final = 3
_EACH_PART: Final = 128

#: The order in which records are read: without a lease, the revision since when, the key.
_Place = tuple[bool, int, str]


@dataclass(frozen=True, slots=True)
class _Held:
    """A record that is there: its place, as how many it counts, and which creation of its key it is."""

    place: _Place
    shares: int
    create_revision: int


def memory_bytes(value: bytes) -> int:
    """What a record takes at most, written and decoded; what is too long or has too many parts is never decoded."""
    parts = count_parts(value)
    is_decoded = len(value) <= MAX_VALUE_BYTES and parts <= MAX_PARTS
    return _EACH_BYTE * len(value) + is_decoded * _EACH_PART * parts


def too_many(refused_count: int, whose: str = "replicas") -> str:
    """That so many records are not read, as text."""
    return f"{refused_count} more records of {whose} are not read: there are too many"


class RecordBounds:
    """``moved`` has the keys that are read, or read no more, since it was emptied last.

    One put or removal moves no more keys than the largest record counts as.
    """

    def __init__(self, most: Most) -> None:
        self.moved: dict[str, None] = {}
        self._most = most
        self._held: dict[str, _Held] = {}
        self._order: list[_Place] = []
        #: How many of them are read, the first in the order, and as how many these count.
        self._count, self._shares = 0, 0

    def __repr__(self) -> str:
        return f"RecordBounds({self._count} of {len(self._order)}, {self._shares} of {self._most.records} shares)"

    @property
    def refused_count(self) -> int:
        """How many are not read."""
        return len(self._order) - self._count

    def is_read(self, key: str) -> bool:
        """Whether the record under a key, which is there, is read."""
        return self._count == len(self._order) or self._held[key].place < self._order[self._count]

    def fill(self, items: Iterable[KeyValue]) -> None:
        """These are all the records that there are; ``moved`` names none of them."""
        self._held = {item.key: self._hold(item, self._held.get(item.key)) for item in items}
        self._order = sorted(each.place for each in self._held.values())
        self._count = self._shares = 0
        self._settle()
        self.moved.clear()

    def put(self, item: KeyValue) -> None:
        """A record has come, or was written again."""
        held = self._hold(item, self._held.get(item.key))
        self._drop(item.key)
        self._held[item.key] = held
        if self.refused_count == 0 or held.place < self._order[self._count]:
            # Read for now; what is too much is the youngest.
            self._count, self._shares = self._count + 1, self._shares + held.shares
        insort(self._order, held.place)
        self._settle()

    def remove(self, key: str) -> None:
        """A record is gone. Unknown ones are fine."""
        self._drop(key)
        # Also one that was too large to be read may have kept others out, which are behind it.
        self._settle()

    def _drop(self, key: str) -> None:
        held = self._held.pop(key, None)
        if held is None:
            return
        index = bisect_left(self._order, held.place)
        del self._order[index]
        self.moved.pop(key, None)
        if index < self._count:
            self._count, self._shares = self._count - 1, self._shares - held.shares

    def _hold(self, item: KeyValue, before: _Held | None) -> _Held:
        shares, is_bare = self._most.shares(item.value), not item.lease_id
        if before is None or before.create_revision != item.create_revision:
            since = item.create_revision if shares == 1 else item.mod_revision
        elif shares > before.shares or is_bare < before.place[0]:
            since = item.mod_revision
        else:
            # A registry that went back in its history may have had fewer revisions.
            since = min(before.place[1], item.mod_revision)
        return _Held((is_bare, since, item.key), shares, item.create_revision)

    def _settle(self) -> None:
        while self._count and self._shares > self._most.records:
            self._count -= 1
            key = self._order[self._count][-1]
            self._shares -= self._held[key].shares
            self.moved[key] = None
        while self._count < len(self._order):
            key = self._order[self._count][-1]
            shares = self._held[key].shares
            if self._shares + shares > self._most.records:
                return
            self._count, self._shares = self._count + 1, self._shares + shares
            self.moved[key] = None
