"""How much the pieces take that hubs have announced and no engine has taken, so that no hub fills the memory. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from omni_discovery import wire

#: For all requests of one hub, in bytes. Small pieces travel in their announcements.
MOST_WAITING_BYTES: Final = 256 << 20
#: A value of an announcement, such as a number, counts as so many bytes.
_VALUE_BYTES: Final = 64


@dataclass(slots=True)
class _Announced:
    """The pieces of one stage for one request: the last number that was announced, and those that wait."""

    last: int = -1
    #: Number and size of each announcement, as they came.
    waiting: deque[tuple[int, int]] = field(default_factory=deque)


class WaitingPieces:
    """The announced pieces of all requests; owned by the ZMQ thread."""

    def __init__(self, most_bytes: int = MOST_WAITING_BYTES) -> None:
        self._most_bytes = most_bytes
        #: By request, then by stage.
        self._announced: dict[str, dict[int, _Announced]] = {}
        #: What waits, in bytes, by hub, and by hub and request.
        self._of_hub: defaultdict[str, int] = defaultdict(int)
        self._of_requests: defaultdict[str, dict[str, int]] = defaultdict(dict)

    def bytes_of(self, hub_id: str) -> int:
        """What the announced pieces of one hub take."""
        return self._of_hub.get(hub_id, 0)

    def has_any(self, key: str) -> bool:
        """Whether announced pieces of a request wait for its engine."""
        return any(announced.waiting for announced in self._announced.get(key, {}).values())

    def is_known(self, key: str, feed: wire.Feed) -> bool:
        """Whether a piece was announced before, as they all are again behind a lost session."""
        announced = self._announced.get(key, {}).get(feed.from_stage)
        return announced is not None and feed.number <= announced.last

    def add(self, hub_id: str, key: str, feed: wire.Feed) -> bool:
        """Count an announced piece, unless it is known; whether there was room for it."""
        if self.is_known(key, feed):
            return True
        size_bytes = _size_of(feed)
        if self._of_hub.get(hub_id, 0) + size_bytes > self._most_bytes:
            return False
        announced = self._announced.setdefault(key, {}).setdefault(feed.from_stage, _Announced())
        announced.last = feed.number
        announced.waiting.append((feed.number, size_bytes))
        self._of_hub[hub_id] += size_bytes
        self._of_requests[hub_id][key] = self._of_requests[hub_id].get(key, 0) + size_bytes
        return True

    def largest_with(self, hub_id: str, key: str, feed: wire.Feed) -> str:
        """The key of that request of a hub which has the most bytes waiting, if this piece of one is counted, too."""
        sizes = self._of_requests.get(hub_id, {})
        mine = sizes.get(key, 0) + _size_of(feed)
        largest = max(sizes, key=sizes.__getitem__, default=key)
        return key if mine >= sizes.get(largest, 0) else largest

    def take(self, hub_id: str, key: str, from_stage: int, number: int) -> None:
        """The engine has all pieces of a stage up to and with ``number``."""
        announced = self._announced.get(key, {}).get(from_stage)
        while announced is not None and announced.waiting and announced.waiting[0][0] <= number:
            self._release(hub_id, key, announced.waiting.popleft()[1])

    def forget_request(self, hub_id: str, key: str) -> None:
        """The request has ended. Unknown requests are ignored."""
        if self._announced.pop(key, None) is not None:
            self._release(hub_id, key, self._of_requests.get(hub_id, {}).get(key, 0))

    def _release(self, hub_id: str, key: str, size_bytes: int) -> None:
        of_requests = self._of_requests[hub_id]
        left = of_requests.pop(key, 0) - size_bytes
        if left > 0:
            of_requests[key] = left
        self._of_hub[hub_id] -= size_bytes
        if self._of_hub[hub_id] <= 0:
            del self._of_hub[hub_id], self._of_requests[hub_id]


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
