"""How much the pieces take that hubs have announced and no engine has taken, so that no hub fills the memory. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any, Final

from omni_discovery import wire

#: For all requests of one hub, in bytes. Small pieces travel in their announcements.
MOST_WAITING_BYTES: Final = 256 << 20
#: A value of an announcement, such as a number, counts as so many bytes.
_VALUE_BYTES: Final = 64


class WaitingPieces:
    """The announced pieces of all requests; owned by the ZMQ thread."""

    def __init__(self, most_bytes: int = MOST_WAITING_BYTES) -> None:
        self._most_bytes = most_bytes
        #: By request, then by stage: number and size of each announcement, as they came. One that comes again, behind
        #: a lost session, counts again until it is taken.
        self._sizes: dict[str, dict[int, deque[tuple[int, int]]]] = {}
        self._of_hub: defaultdict[str, int] = defaultdict(int)

    def bytes_of(self, hub_id: str) -> int:
        """What the announced pieces of one hub take."""
        return self._of_hub.get(hub_id, 0)

    def has_any(self, key: str) -> bool:
        """Whether announced pieces of a request wait for its engine."""
        return any(self._sizes.get(key, {}).values())

    def add(self, hub_id: str, key: str, feed: wire.Feed) -> bool:
        """Count an announced piece; whether there was room for it."""
        size_bytes = _size_of(feed)
        if self._of_hub[hub_id] + size_bytes > self._most_bytes:
            return False
        self._sizes.setdefault(key, {}).setdefault(feed.from_stage, deque()).append((feed.number, size_bytes))
        self._of_hub[hub_id] += size_bytes
        return True

    def take(self, hub_id: str, key: str, from_stage: int, number: int) -> None:
        """The engine has all pieces of a stage up to and with ``number``."""
        sizes = self._sizes.get(key, {}).get(from_stage)
        while sizes and sizes[0][0] <= number:
            self._release(hub_id, sizes.popleft()[1])

    def forget_request(self, hub_id: str, key: str) -> None:
        """The request has ended. Unknown requests are ignored."""
        for sizes in self._sizes.pop(key, {}).values():
            self._release(hub_id, sum(size_bytes for _, size_bytes in sizes))

    def _release(self, hub_id: str, size_bytes: int) -> None:
        self._of_hub[hub_id] -= size_bytes
        if self._of_hub[hub_id] <= 0:
            del self._of_hub[hub_id]


def _size_of(feed: wire.Feed) -> int:
    """What an announced piece takes: the bytes in it, and some for each value."""
    size_bytes, waiting = _VALUE_BYTES, list[Any]([] if feed.payload is None else [feed.payload.metadata])
    while waiting:
        each = waiting.pop()
        size_bytes += _VALUE_BYTES
        if isinstance(each, str | bytes):
            size_bytes += len(each)
        elif isinstance(each, Mapping):
            waiting += (*each, *each.values())
        elif isinstance(each, list | tuple):
            waiting += each
    return size_bytes
