"""How much memory the references to hand-offs take that a hub keeps for its requests, so that none fills it. Pure.

A reference is kept while a stage may still need its hand-off, the pieces of a producer until its attempt ends. A small
hand-off travels in its reference.
"""

from __future__ import annotations

from collections.abc import Iterable
from sys import getsizeof
from typing import Any, Final

from omni_discovery.wire import PayloadRef

#: For one attempt of one stage. The metadata of connectors have a few hundred bytes, and of a small hand-off, below
#: 64 KiB unless a document says otherwise, all of it: of pieces for each token of a large model, 25 000 fit.
MOST_OF_ATTEMPT_BYTES: Final = 256 << 20
#: For all requests of a hub.
MOST_TOGETHER_BYTES: Final = 2 << 30
#: A reference beside its texts and its metadata, and a number: those of a KV cache's blocks are many.
_REFERENCE_BYTES: Final = 128
_NUMBER_BYTES: Final = 32
_NUMBERS: Final = frozenset((int, float, bool, type(None)))


def memory_of(refs: Iterable[PayloadRef]) -> int:
    """The estimated memory of references, in bytes; what a value shares with others counts each time."""
    size_bytes, waiting = 0, list[Any]()
    for ref in refs:
        size_bytes += _REFERENCE_BYTES + getsizeof(ref.key) + getsizeof(ref.connector)
        waiting.append(ref.metadata)
    while waiting:
        each = waiting.pop()
        size_bytes += getsizeof(each) + _NUMBER_BYTES * len(each)
        for value in (*each, *each.values()) if isinstance(each, dict) else each:
            if type(value) in _NUMBERS:
                continue
            if isinstance(value, (dict, list, tuple)):
                waiting.append(value)
            else:
                size_bytes += getsizeof(value)
    return size_bytes


class KeptReferences:
    """How many bytes the references of each request take, of ``most_bytes`` for all."""

    def __init__(self, most_bytes: int = MOST_TOGETHER_BYTES) -> None:
        self._most_bytes = most_bytes
        self._of_requests: dict[str, int] = {}
        self.kept_bytes = 0

    @property
    def are_too_many(self) -> bool:
        """Whether they take more than they may."""
        return self.kept_bytes > self._most_bytes

    @property
    def largest(self) -> str:
        """The id of the request whose references take the most. Raise ValueError if none is noted."""
        return max(self._of_requests, key=self._of_requests.__getitem__)

    def note(self, request_id: str, size_bytes: int) -> None:
        """Note what the references of a request take now."""
        self.kept_bytes += size_bytes - self._of_requests.get(request_id, 0)
        self._of_requests[request_id] = size_bytes

    def forget(self, request_id: str) -> None:
        """The request has ended. Unknown ones are ignored."""
        self.kept_bytes -= self._of_requests.pop(request_id, 0)
