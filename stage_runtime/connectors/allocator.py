"""Which parts of a region of memory are taken. Pure."""

from __future__ import annotations

import bisect
from typing import Final

_ALIGNMENT: Final = 4096


class BufferAllocator:
    """Offsets in a region of ``size_bytes``: first fit, free neighbours are joined. Not for several threads."""

    def __init__(self, size_bytes: int) -> None:
        #: Free stretches as (offset, size), by offset; no two of them touch.
        self._free = [(0, size_bytes)]

    def allocate(self, size_bytes: int) -> tuple[int, int] | None:
        """Offset and size of a block for so many bytes; None if no stretch is that long."""
        wanted = max(-(-size_bytes // _ALIGNMENT), 1) * _ALIGNMENT
        for position, (offset, size) in enumerate(self._free):
            if size >= wanted:
                self._free[position : position + 1] = [(offset + wanted, size - wanted)] if size > wanted else []
                return offset, wanted
        return None

    def free(self, offset: int, size_bytes: int) -> None:
        """Take a block back that ``allocate`` gave."""
        position = bisect.bisect(self._free, (offset, 0))
        start, end = offset, offset + size_bytes
        following = position
        if position and sum(self._free[position - 1]) == start:
            position -= 1
            start = self._free[position][0]
        if following < len(self._free) and self._free[following][0] == end:
            end += self._free[following][1]
            following += 1
        self._free[position:following] = [(start, end - start)]

    @property
    def free_bytes(self) -> int:
        """All that is free, in however many stretches."""
        return sum(size for _, size in self._free)
