"""The queue of pictures, and which of them make the next batch. Pure.

A diffusers pipeline draws a batch from its first step to its last, so the pictures of a batch have to be alike: of
equal size, steps and guidance.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, order=True)
class Waiting(Generic[_Item]):
    """A request in the queue. Lower ``priority`` goes first, then the lower ``number``, which counts arrivals."""

    priority: int
    number: int
    key: str = field(compare=False)
    #: Equal for all pictures of one batch.
    alike: Hashable = field(compare=False)
    item: _Item = field(compare=False)
    #: It was in a batch that failed for an unknown reason: drawn in a batch of its own.
    is_alone: bool = field(default=False, compare=False)


class BatchQueue(Generic[_Item]):
    """Waiting requests, in the order in which they are served."""

    def __init__(self) -> None:
        self._waiting: list[Waiting[_Item]] = []
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: str) -> bool:
        return any(each.key == key for each in self._waiting)

    def add(self, key: str, item: _Item, alike: Hashable, priority: int = 0) -> None:
        """Put a request behind the others of its priority."""
        self._numbers += 1
        insort(self._waiting, Waiting(priority, self._numbers, key, alike, item))

    def remove(self, key: str) -> bool:
        """Remove a request; whether it was there."""
        before = len(self._waiting)
        self._waiting = [each for each in self._waiting if each.key != key]
        return len(self._waiting) < before

    def requeue_alone(self, failed: list[Waiting[_Item]]) -> None:
        """Put the requests of a failed batch back to their places, each to be drawn in a batch of its own."""
        for each in failed:
            insort(self._waiting, replace(each, is_alone=True))

    def pop_batch(self, capacity: int) -> list[Waiting[_Item]]:
        """Remove the next batch: the first request, and the next ones that are alike, ``capacity`` at most."""
        if not self._waiting:
            return []
        first = self._waiting[0]
        batch = [each for each in self._waiting if not each.is_alone and each.alike == first.alike][:capacity]
        batch = [first] if first.is_alone else batch
        taken = {each.number for each in batch}
        self._waiting = [each for each in self._waiting if each.number not in taken]
        return batch

    def clear(self) -> None:
        """Remove all requests."""
        self._waiting.clear()
