"""A segment as a reader's process sees it, from payload to payload.

Opening and mapping a file takes longer than all else, and so do the faults of its pages: a segment that was read once
stays mapped for the next payload in it. That holds no memory, for whoever gives a segment up cuts its file down to
nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from typing import Final

import numpy as np

from stage_runtime.connectors.layout import HEADER_BYTES

#: What the kernel says of each page of this process, in 8 bytes. Their highest three bits: the page is there, it is
#: swapped out, it is a file's. A page of a private mapping that was written to is there and no file's.
PAGEMAP = "/proc/self/pagemap"
_UNTOUCHED: Final = 0b000
_OF_THE_FILE: Final = 0b101


class Mapped:
    """A segment in this process: its file, and all of it mapped privately. One view at a time has it."""

    # Held here, for modules are empty when the last of them go as the process ends.
    _flock, _unlock = staticmethod(fcntl.flock), fcntl.LOCK_UN
    _pid_now, _close = staticmethod(os.getpid), staticmethod(os.close)

    def __init__(self, name: str, descriptor: int, size_bytes: int) -> None:
        self.descriptor = self._pages = -1
        self.name = name
        self.map = mmap.mmap(descriptor, size_bytes, access=mmap.ACCESS_COPY)
        self._address: int = np.frombuffer(self.map, np.uint8).__array_interface__["data"][0]
        self._pid = self._pid_now()
        with contextlib.suppress(OSError):
            # Of this process: one that it forks opens its own.
            self._pages = os.open(PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
        self.descriptor = descriptor

    def is_ours(self) -> bool:
        """False in a process that was forked later: the lock there is still that of the other."""
        return self._pid == self._pid_now()

    def is_whole(self) -> bool:
        """Whether the file is as long as it was."""
        return os.lseek(self.descriptor, 0, os.SEEK_END) == len(self.map)

    def unlock(self) -> None:
        """Let the owner use the segment again."""
        self._flock(self.descriptor, self._unlock)

    def forget(self, size_bytes: int) -> bool:
        """Lose what was written to a view of so many bytes.

        False if the owner gave the segment up: then its memory goes too, unless somebody else looks at it.
        """
        if self._was_written(HEADER_BYTES + size_bytes):
            self.map.madvise(mmap.MADV_DONTNEED)
        if os.fstat(self.descriptor).st_nlink:
            return True
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self.descriptor, 0)
        return False

    def _was_written(self, size_bytes: int) -> bool:
        """Whether any of the first pages is not the file's any more; True where the kernel doesn't say."""
        if self._pages < 0:
            return True
        first, count = self._address // mmap.PAGESIZE, -(-size_bytes // mmap.PAGESIZE)
        found = np.frombuffer(os.pread(self._pages, 8 * count, 8 * first), np.uint64) >> np.uint64(61)
        return len(found) < count or bool(((found != _UNTOUCHED) & (found != _OF_THE_FILE)).any())

    def close(self) -> None:
        """Unlock and close it. The mapping goes with the last that views it. Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0 and self.is_ours():
            self._flock(descriptor, self._unlock)
        if descriptor >= 0:
            self._close(descriptor)
        pages, self._pages = self._pages, -1
        if pages >= 0:
            self._close(pages)

    __del__ = close
