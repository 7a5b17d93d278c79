"""HandOffRecord: whose fault it is that a hand-off can't be read, its producer's or its consumer's. Pure.

Both say something of themselves only: the consumer that it can't read, the producer that it has handed over. So their
last hand-offs are compared, with whomever. The one that fails more often is at fault; the producer, if it is not clear.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

#: Hand-offs that are compared of each replica, and replicas that are known, the latest.
_WINDOW: Final = 20
_MOST_REPLICAS: Final = 4096
#: After so long without a failure all is forgotten.
_FORGET_S: Final = 300.0


class HandOffRecord:
    """The last hand-offs of replicas, by their addresses. Nothing is kept while all can be read."""

    def __init__(self) -> None:
        #: Whether each could be read, the newest last; the replica that was heard of last is the last one.
        self._read: OrderedDict[str, deque[bool]] = OrderedDict()
        self._failed_at_s = float("-inf")

    def __len__(self) -> int:
        return len(self._read)

    def hand_off_read(self, producer: str, consumer: str, now_s: float) -> None:
        """A consumer has done its work with what a producer left."""
        if self._read and now_s - self._failed_at_s > _FORGET_S:
            self._read.clear()
        if self._read:
            self._note(producer, consumer, is_read=True)

    def is_consumers_fault(self, producer: str, consumer: str, now_s: float) -> bool:
        """A consumer can't read what a producer left: whether the consumer is at fault, and not the producer."""
        self._failed_at_s = now_s
        self._note(producer, consumer, is_read=False)
        return self._failing(consumer) > self._failing(producer)

    def _note(self, *addrs: str, is_read: bool) -> None:
        for addr in addrs:
            self._read.setdefault(addr, deque(maxlen=_WINDOW)).append(is_read)
            self._read.move_to_end(addr)
        while len(self._read) > _MOST_REPLICAS:
            self._read.popitem(last=False)

    def _failing(self, addr: str) -> float:
        """The share of its last hand-offs that could not be read."""
        return self._read[addr].count(False) / len(self._read[addr])
