"""Which pictures are drawn together. Pure.

A diffusers pipeline draws a batch from its first step to its last, so what is drawn together has to be alike: of equal
size, steps and guidance.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, order=True)
class Waiting(Generic[_Item]):
    """A request in the queue. Lower ``priority`` goes first, then who came first."""

    priority: int
    number: int
    key: str = field(compare=False)
    #: What all pictures of one batch share.
    alike: Hashable = field(compare=False)
    item: _Item = field(compare=False)
    #: Its batch has failed and nobody knows through whom: drawn with nobody else.
    is_alone: bool = field(default=False, compare=False)


class BatchQueue(Generic[_Item]):
    """Requests that wait, in the order in which they are served."""

    def __init__(self) -> None:
        self._waiting: list[Waiting[_Item]] = []
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: str) -> bool:
        return any(each.key == key for each in self._waiting)

    def add(self, key: str, item: _Item, alike: Hashable, priority: int = 0) -> None:
        """Put a request behind those of its priority."""
        self._numbers += 1
        insort(self._waiting, Waiting(priority, self._numbers, key, alike, item))

    def remove(self, key: str) -> bool:
        """Take a request out; say whether it was there."""
        before = len(self._waiting)
        self._waiting = [each for each in self._waiting if each.key != key]
        return len(self._waiting) < before

    def requeue_alone(self, failed: list[Waiting[_Item]]) -> None:
        """Put the requests of a batch that failed back to their places, each to be drawn alone."""
        for each in failed:
            insort(self._waiting, replace(each, is_alone=True))

    def pop_batch(self, capacity: int) -> list[Waiting[_Item]]:
        """Take out the next batch: whoever is first, and the next ones that are alike; empty if nobody waits."""
        if not self._waiting:
            return []
        first = self._waiting[0]
        batch = [each for each in self._waiting if not each.is_alone and each.alike == first.alike][:capacity]
        batch = [first] if first.is_alone else batch
        taken = {each.number for each in batch}
        self._waiting = [each for each in self._waiting if each.number not in taken]
        return batch

    def clear(self) -> None:
        """Forget them all."""
        self._waiting.clear()
