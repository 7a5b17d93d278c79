"""ReceiptRing: the receipts of the requests that ended last, bounded in number and in bytes; failed ones stay longer.

Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

#: Of so many receipts one is kept of a request that failed, beside the others.
_FAILED_SHARE: Final = 5
#: What receipts may weigh on average, in bytes.
_MEAN_BYTES: Final = 6400
#: What a receipt weighs beside its bytes, about.
_OVERHEAD_BYTES: Final = 400

#: What names a request: its id inside the hub, the id that the client sees, and the client's label.
Ids = tuple[str, str, str]
#: Whether it failed, its ids, and the encoded receipt. Nothing in it is followed by the garbage collector.
KeptReceipt = tuple[bool, str, str, str, bytes]


class _Bounded:
    """Receipts, oldest first; the oldest make room."""

    def __init__(self, count: int) -> None:
        self._most, self._most_bytes = count, count * _MEAN_BYTES
        self.receipts: deque[KeptReceipt] = deque()
        self.size_bytes = 0

    def add(self, receipt: KeptReceipt) -> None:
        receipts = self.receipts
        receipts.append(receipt)
        self.size_bytes += len(receipt[4]) + _OVERHEAD_BYTES
        while len(receipts) > self._most or self.size_bytes > self._most_bytes:
            self.size_bytes -= len(receipts.popleft()[4]) + _OVERHEAD_BYTES


class ReceiptRing:
    """``count`` receipts of requests that ended, and a fifth as many of those that failed."""

    def __init__(self, count: int) -> None:
        self._served = _Bounded(count)
        self._failed = _Bounded(max(1, count // _FAILED_SHARE))

    def __repr__(self) -> str:
        return f"ReceiptRing({len(self)} receipts, {self.size_bytes} bytes)"

    def __len__(self) -> int:
        return len(self._served.receipts) + len(self._failed.receipts)

    @property
    def size_bytes(self) -> int:
        """The memory of all receipts, about."""
        return self._served.size_bytes + self._failed.size_bytes

    def add(self, ids: Ids, encoded: bytes, *, failed: bool) -> None:
        """Keep the receipt of a request that has ended."""
        (self._failed if failed else self._served).add((failed, *ids, encoded))

    def failed(self) -> Iterator[bytes]:
        """The receipts of requests that failed, the one that was added last first."""
        return (each[4] for each in reversed(self._failed.receipts))

    def served(self) -> Iterator[bytes]:
        """The receipts of requests that did not fail, the one that was added last first."""
        return (each[4] for each in reversed(self._served.receipts))

    def find(self, name: str, most: int) -> list[bytes]:
        """The receipts of the requests that a user may mean by this name, companions included.

        No more than ``most``, as a label may be that of any number of requests: first those that failed, newest first.
        """
        kept = [*reversed(self._failed.receipts), *reversed(self._served.receipts)]
        return [kept[place][4] for place in meant([each[1:4] for each in kept], name)[:most]]


def meant(all_ids: Sequence[Ids], name: str) -> list[int]:
    """The places of the ids that a user may mean by a name; a name as it stands goes before one that is only alike."""
    exact = [place for place, ids in enumerate(all_ids) if name in ids] if name else []
    if exact:
        return exact
    # An answer of several choices is several requests, "chatcmpl-ID-0" and so on; headers and other servers say "ID".
    parts = {part for part in name.split("-") if len(part) >= _LEAST_ID}
    return [place for place, (_, shown_id, _) in enumerate(all_ids) if not parts.isdisjoint(shown_id.split("-"))]


#: So many characters of an id are not by chance part of another.
_LEAST_ID: Final = 16
