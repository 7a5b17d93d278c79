"""RecordBounds: how many records of replicas a view holds, and which, where there are more. Pure.

Whoever may write one replica's record may write any number, and each costs memory in every process that watches. Which
ones are read follows from the registry alone, so that all hubs read the same: those with a lease before those without,
the oldest first. One that comes pushes out none that has been there with a lease, and gets the place of one that goes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Final

from omni_discovery.kv import KeyValue
from omni_discovery.records.sizes import MAX_PARTS, MAX_VALUE_BYTES, count_parts

#: Records of replicas in one namespace that are read.
MOST_RECORDS: Final = 10_000
#: What they may take of memory, by an estimate that is too high for nearly all: measured are 1.8 kB for a small record,
#: which counts as 2.1 kB, and 560 kB for one of four thousand numbers with names, which counts as 700 kB.
MOST_MEMORY_BYTES: Final = 512 << 20
_EACH_BYTE: Final = 3
_EACH_PART: Final = 128

#: The order in which records are read: without a lease, the revision of its creation, its key.
_Place = tuple[bool, int, str]


def memory_bytes(value: bytes) -> int:
    """What a record takes at most, written and decoded; what is too long or has too many parts is never decoded."""
    parts = count_parts(value)
    is_decoded = len(value) <= MAX_VALUE_BYTES and parts <= MAX_PARTS
    return _EACH_BYTE * len(value) + is_decoded * _EACH_PART * parts


def too_many(refused_count: int) -> str:
    """That so many records of replicas are not read, as text."""
    return f"{refused_count} more records of replicas are not read: there are too many"


class RecordBounds:
    """``moved`` has the keys that are read, or read no more, since it was emptied last."""

    def __init__(self) -> None:
        self.moved: dict[str, None] = {}
        self._places: dict[str, tuple[_Place, int]] = {}
        self._order: list[_Place] = []
        #: How many of them are read, the first in the order, and what these take.
        self._count, self._memory = 0, 0

    def __repr__(self) -> str:
        return f"RecordBounds({self._count} of {len(self._order)}, {self._memory >> 20} MiB)"

    @property
    def refused_count(self) -> int:
        """How many are not read."""
        return len(self._order) - self._count

    def is_read(self, key: str) -> bool:
        """Whether the record under a key, which is there, is read."""
        return self._count == len(self._order) or self._places[key][0] < self._order[self._count]

    def fill(self, items: Iterable[KeyValue]) -> None:
        """These are all the records that there are; ``moved`` names none of them."""
        self._places = {item.key: (_place(item), memory_bytes(item.value)) for item in items}
        self._order = sorted(place for place, _ in self._places.values())
        self._count = self._memory = 0
        self._settle()
        self.moved.clear()

    def put(self, item: KeyValue) -> None:
        """A record has come, or was written again."""
        self.remove(item.key)
        place, memory = self._places[item.key] = _place(item), memory_bytes(item.value)
        if self.refused_count == 0 or place < self._order[self._count]:
            # Read for now; what is too much is the youngest.
            self._count, self._memory = self._count + 1, self._memory + memory
        insort(self._order, place)
        self._settle()

    def remove(self, key: str) -> None:
        """A record is gone. Unknown ones are fine."""
        place, memory = self._places.pop(key, (None, 0))
        if place is None:
            return
        index = bisect_left(self._order, place)
        del self._order[index]
        self.moved.pop(key, None)
        if index < self._count:
            self._count, self._memory = self._count - 1, self._memory - memory
        # Also one that was too large to be read may have kept others out, which are behind it.
        self._settle()

    def _settle(self) -> None:
        while self._count and (self._count > MOST_RECORDS or self._memory > MOST_MEMORY_BYTES):
            self._count -= 1
            key = self._order[self._count][-1]
            self._memory -= self._places[key][1]
            self.moved[key] = None
        while self._count < min(MOST_RECORDS, len(self._order)):
            key = self._order[self._count][-1]
            memory = self._places[key][1]
            if self._memory + memory > MOST_MEMORY_BYTES:
                return
            self._count, self._memory = self._count + 1, self._memory + memory
            self.moved[key] = None


def _place(item: KeyValue) -> _Place:
    return not item.lease_id, item.create_revision, item.key
