"""Queues that share one event: a task can wait for all of them at once."""

from __future__ import annotations

import asyncio
from typing import TypeVar

_Item = TypeVar("_Item")


class WakingQueue(asyncio.Queue[_Item]):
    """A bounded queue that sets an event whenever something is put in."""

    def __init__(self, maxsize: int, wake: asyncio.Event) -> None:
        super().__init__(maxsize)
        self._wake = wake

    def _put(self, item: _Item) -> None:
        super()._put(item)
        self._wake.set()


def drain(queue: asyncio.Queue[_Item]) -> list[_Item]:
    """Everything that is in the queue now."""
    return [queue.get_nowait() for _ in range(queue.qsize())]
