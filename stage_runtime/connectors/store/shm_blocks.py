"""Blocks of shared memory that one process writes and others map, and the pool that reuses them.

Making a block costs more than filling it, so free ones are kept. With a directory they are files there, which other
processes of the same user map; without one they are memory of this process alone.

A reader holds a shared lock on the file as long as it uses the mapping; if the reader is killed, the kernel releases
the lock. The owner takes the exclusive lock of a returned block when no reader is left, and holds it until the next
hand-off in it is complete.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import resource
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from stage_runtime.connectors.serialization import Buffer
from stage_runtime.connectors.store.layout import (
    CONSUMED,
    FETCHED,
    FETCHED_AT,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    NOT_FETCHED,
    STATE_AT,
    TAKEN,
    State,
    home_path,
    me,
    new_number,
    segment_name,
)

#: Smaller free blocks are not kept: making a small block is as cheap as finding it again.
KEPT_FROM_BYTES: Final = 32768
#: Free blocks that are kept at most, and that much less where this process may open few files: each has two of them.
_MOST_FREE: Final = 256
_FREE_SHARE: Final = 16
#: How many free blocks of a size are tried for one without readers before a new one is made.
_TRIES: Final = 16
#: Parts from this size on are copied one by one, smaller ones are joined first.
_LARGE: Final = 16384
#: Parts from this size on are copied by numpy, which releases the GIL. What is smaller is copied within some ten
#: microseconds, and is not worth the steps that numpy needs for it.
_HUGE: Final = 2 << 20
#: How many other names a block tries if the one that it had was taken meanwhile.
_NAMES_TRIED: Final = 3
_FREE: Final = bytes([State.FREE])
_GONE: Final = bytes([State.GONE])


def size_class(size_bytes: int) -> int:
    """The capacity in bytes of a block for ``size_bytes``: four steps to a doubling, so a quarter is wasted at most."""
    if size_bytes < KEPT_FROM_BYTES:
        return max(size_bytes, 1)
    step = 1 << max((size_bytes - 1).bit_length() - 3, 12)
    return -(-size_bytes // step) * step


class ShmBlock:
    """One block of shared memory, see MemoryBlock. Owned by the caller that took it from the pool.

    Readers that do not consume note their fetch only if the block is ``counted``. The constructor raises OSError if
    there is no memory or no descriptor.
    """

    def __init__(self, directory: str | None, capacity: int, *, counted: bool = True) -> None:
        self.capacity = capacity
        self._file_bytes = HEADER_BYTES + capacity
        #: Threads of this process that send from it; changed only under the store's lock.
        self.pins = 0
        self._allocated = 0
        #: Whether this process holds the exclusive lock.
        self._is_locked = False
        self._counted = counted
        self._directory = directory
        self._take_name()
        self._descriptor = self._open()
        #: Its path now; None for memory of this process alone.
        self.path = self._home
        try:
            os.ftruncate(self._descriptor, self._file_bytes)
            self._allocate(HEADER_BYTES)
            self._map = mmap.mmap(self._descriptor, self._file_bytes)
        except BaseException:
            self._unlink()
            os.close(self._descriptor)
            raise

    def _take_name(self) -> None:
        owner, number = me(), new_number()
        self._whose = (owner.pid, owner.started, owner.pid_namespace, number)
        self._home = None if self._directory is None else home_path(self._directory, owner, number)
        #: Unique on this machine.
        self.id = segment_name(owner, number)

    def _open(self) -> int:
        if self._home is None:
            return os.memfd_create("omni-segment", os.MFD_CLOEXEC)
        return os.open(self._home, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def try_lock(self) -> bool:
        """Take the exclusive lock, for writing; False while there is a reader."""
        if not self._is_locked and not self.pins:
            self._is_locked = self._home is None or self._lock()
        return self._is_locked

    def is_whole(self) -> bool:
        """Whether the file has its full length. If not, touching the mapping would be a bus error."""
        return os.lseek(self._descriptor, 0, os.SEEK_END) == self._file_bytes

    def fill(self, parts: Sequence[Buffer], size_bytes: int, generation: bytes, key_digest: bytes) -> None:
        """See MemoryBlock. Readers never see a part of it: until all is written, the block is locked and hidden."""
        # Allocated first: without memory, that is an error here and not a bus error while copying.
        self._allocate(HEADER_BYTES + size_bytes)
        small: list[Buffer] = []
        place = HEADER_BYTES
        for part in parts:
            if len(part) < _LARGE:
                small.append(part)
                continue
            place = self._write(small, place)
            small.clear()
            end = place + len(part)
            if len(part) < _HUGE:
                self._map[place:end] = part
            else:
                np.frombuffer(self._map, np.uint8, len(part), place)[:] = np.frombuffer(part, np.uint8)
            place = end
        self._write(small, place)
        about = (State.READY, NOT_FETCHED, self._counted, size_bytes)
        HEADER.pack_into(self._map, 0, MAGIC, *about, *self._whose, generation, key_digest)
        self._is_locked = False
        if self._home is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def publish(self, path: str) -> None:
        """See MemoryBlock. Replaces the file that had this path."""
        if self.path is not None:
            os.rename(self.path, path)  # noqa: PTH104 - names are plain text here
            self.path = path

    def hide(self) -> bool:
        """See MemoryBlock. False also if another block was published under its path."""
        if self.path is None or self._home is None or self.path == self._home:
            return True
        for _ in range(_NAMES_TRIED):
            try:
                if not self._is_mine(self.path):
                    return False
                os.rename(self.path, self._home)  # noqa: PTH104
            except OSError as error:
                if error.errno not in TAKEN:
                    return False
                # Everybody saw the name while the block had it, and anybody may have taken it since.
                self._take_name()
            else:
                self.path = self._home
                return True
        return False

    def withdraw(self) -> bool:
        """Mark it as free and hide it. False if its path is unknown, after a reader that died while it consumed."""
        # One byte, so that the change is atomic.
        os.pwrite(self._descriptor, _FREE, STATE_AT)
        if self.hide():
            return True
        # A consuming reader renames it to its home path itself, unless the reader died before that.
        if self._home is not None and not self._is_mine(self._home):
            return False
        self.path = self._home
        return True

    @property
    def name(self) -> str:
        """See MemoryBlock."""
        return "" if self.path is None else self.path.rpartition("/")[2]

    @property
    def fetched(self) -> bool:
        """See MemoryBlock."""
        return self._note() in (FETCHED, CONSUMED)

    @property
    def consumed(self) -> bool:
        """See MemoryBlock."""
        return self._note() == CONSUMED

    def note_fetched(self) -> None:
        """See MemoryBlock."""
        os.pwrite(self._descriptor, bytes([FETCHED]), FETCHED_AT)

    def view(self, size_bytes: int) -> memoryview:
        """See MemoryBlock."""
        return memoryview(self._map)[HEADER_BYTES : HEADER_BYTES + size_bytes]

    def drop(self) -> None:
        """See MemoryBlock."""
        # Written before the paths are unlinked: a consuming reader checks this after it has renamed the file.
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, _GONE, STATE_AT)
        self._unlink()
        # A thread that still sends from the mapping releases it at its end.
        with contextlib.suppress(BufferError):
            self._map.close()
            # Readers keep unused files open; those must hold no memory.
            if self._home is not None and self._lock():
                os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)

    # Bytes that are read at any time are read by the descriptor, so that a truncated file is no bus error.

    def _lock(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _note(self) -> int:
        found = os.pread(self._descriptor, 1, FETCHED_AT)
        return found[0] if found else NOT_FETCHED

    def _write(self, small: Sequence[Buffer], place: int) -> int:
        if not small:
            return place
        written = b"".join(small)
        self._map[place : place + len(written)] = written
        return place + len(written)

    def _allocate(self, up_to: int) -> None:
        if up_to > self._allocated:
            os.posix_fallocate(self._descriptor, self._allocated, up_to - self._allocated)
            self._allocated = up_to

    def _is_mine(self, path: str) -> bool:
        try:
            found = os.stat(path, follow_symlinks=False)  # noqa: PTH116
        except OSError:
            return False
        mine = os.fstat(self._descriptor)
        return (found.st_ino, found.st_dev) == (mine.st_ino, mine.st_dev)

    def _unlink(self) -> None:
        for path in {self.path, self._home} - {None}:
            assert path is not None  # noqa: S101 - for the type checker
            with contextlib.suppress(OSError):
                if self._is_mine(path):
                    os.unlink(path)  # noqa: PTH108


class ShmBlockPool:
    """See BlockPool. Keeps ``keep_bytes`` of free blocks at most, and so few that they take no file from others."""

    def __init__(self, directory: Path | None, keep_bytes: int, *, counted: bool = True) -> None:
        self._counted = counted
        self._directory = None if directory is None else str(directory)
        self._keep_bytes = keep_bytes
        self._lock = threading.Lock()
        #: By capacity, the one that was returned last at the end.
        self._free: dict[int, list[ShmBlock]] = {}
        #: How many of a capacity were free all the time since the last ``shrink``: those at the front.
        self._unused: dict[int, int] = {}
        self._free_bytes = 0
        self._free_count = 0
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most_free = _MOST_FREE if limit == resource.RLIM_INFINITY else min(_MOST_FREE, limit // _FREE_SHARE)
        self._closed = False
        self.made = 0

    def take_block(self, size_bytes: int) -> ShmBlock:
        """See BlockPool. The block is locked and has no readers."""
        capacity = size_class(size_bytes)
        with self._lock:
            free = self._free.get(capacity, [])
            # The block that was returned last is the likeliest to be in the processor's cache.
            for position in range(len(free) - 1, max(len(free) - 1 - _TRIES, -1), -1):
                if free[position].try_lock() and free[position].is_whole():
                    self._free_bytes -= capacity
                    self._free_count -= 1
                    self._unused[capacity] = min(self._unused.get(capacity, 0), position)
                    return free.pop(position)
        segment = ShmBlock(self._directory, capacity, counted=self._counted)
        if not segment.try_lock():
            segment.drop()
            raise OSError(errno.EBUSY, "a new segment is locked by somebody else")
        self.made += 1
        return segment

    def give_back(self, segment: ShmBlock) -> None:
        """See BlockPool. Small blocks, and those beyond what is kept, are dropped."""
        if segment.withdraw() and segment.capacity >= KEPT_FROM_BYTES:
            segment.try_lock()
            with self._lock:
                if self._has_room(segment.capacity):
                    self._free.setdefault(segment.capacity, []).append(segment)
                    self._free_bytes += segment.capacity
                    self._free_count += 1
                    return
        segment.drop()

    def shrink(self) -> None:
        """See BlockPool."""
        dropped: list[ShmBlock] = []
        with self._lock:
            for capacity, free in list(self._free.items()):
                unused = self._unused.get(capacity, 0)
                dropped += free[:unused]
                del free[:unused]
                self._free_bytes -= capacity * unused
                self._free_count -= unused
                self._unused[capacity] = len(free)
                if not free:
                    del self._free[capacity], self._unused[capacity]
        for segment in dropped:
            segment.drop()

    def trim(self) -> None:
        """See BlockPool."""
        with self._lock:
            dropped = [segment for free in self._free.values() for segment in free]
            self._free.clear()
            self._unused.clear()
            self._free_bytes = 0
            self._free_count = 0
        for segment in dropped:
            segment.drop()

    def close(self) -> None:
        """See BlockPool."""
        self._closed = True
        self.trim()

    @property
    def free_bytes(self) -> int:
        """See BlockPool."""
        return self._free_bytes

    def _has_room(self, size_bytes: int) -> bool:
        has_bytes = self._free_bytes + size_bytes <= self._keep_bytes
        return not self._closed and has_bytes and self._free_count < self._most_free
