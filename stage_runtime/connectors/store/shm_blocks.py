"""Segments: memory that one process writes and others may map, used again and again.

Making one costs more than filling it, so those that are free are kept. With a directory they are files there, which
others of the same user map; without one they are memory of this process alone.

A reader holds a shared lock on the file for as long as it looks at it, and the kernel takes the lock back if the reader
is killed. The owner takes the exclusive lock of what it got back as soon as nobody looks any more, and holds it until
the next payload is complete.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
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
    State,
    home_path,
    me,
    segment_name,
)

#: Smaller segments are not kept when they are free: making a small one is as cheap as finding it again.
KEPT_FROM_BYTES: Final = 32768
#: So many of one size are tried for one that nobody looks at any more, before a new one is made.
_TRIES: Final = 16
#: From here on a part is copied by numpy, which lets other threads run meanwhile; smaller ones are joined first.
_LARGE: Final = 16384
_FREE: Final = bytes([State.FREE])
_GONE: Final = bytes([State.GONE])

_numbers = itertools.count()


def size_class(size_bytes: int) -> int:
    """The capacity that a payload of that size gets: four steps to each doubling, so at most a quarter is wasted."""
    if size_bytes < KEPT_FROM_BYTES:
        return max(size_bytes, 1)
    step = 1 << max((size_bytes - 1).bit_length() - 3, 12)
    return -(-size_bytes // step) * step


class ShmBlock:
    """One piece of memory. Whoever got it from a pool may fill and publish it; ``pins`` counts who sends from it.

    Readers that do not consume only say that they were there if it is ``counted``.
    """

    def __init__(self, directory: str | None, capacity: int, *, counted: bool = True) -> None:
        self.capacity = capacity
        self._file_bytes = HEADER_BYTES + capacity
        #: Threads of this process that read from it; changed only under the lock of whoever keeps it.
        self.pins = 0
        self._allocated = 0
        #: Whether it is ours alone.
        self._is_locked = False
        self._counted = counted
        owner, number = me(), next(_numbers)
        self._whose = (owner.pid, owner.started, owner.pid_namespace, number)
        self._home = None if directory is None else home_path(directory, owner, number)
        #: What tells it from all others of this machine.
        self.id = segment_name(owner, number)
        #: The name that it has now; None for memory that has none.
        self.path = self._home
        if self._home is None:
            self._descriptor = os.memfd_create("omni-segment", os.MFD_CLOEXEC)
        else:
            self._descriptor = os.open(self._home, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(self._descriptor, self._file_bytes)
            self._allocate(HEADER_BYTES)
            self._map = mmap.mmap(self._descriptor, self._file_bytes)
        except BaseException:
            self._unlink()
            os.close(self._descriptor)
            raise

    def try_lock(self) -> bool:
        """Take it for writing; False while anybody looks at it."""
        if not self._is_locked and not self.pins:
            self._is_locked = self._home is None or self._lock()
        return self._is_locked

    def is_whole(self) -> bool:
        """False if somebody cut the file short: then it must not be touched any more."""
        return os.lseek(self._descriptor, 0, os.SEEK_END) == self._file_bytes

    def fill(self, parts: Sequence[Buffer], size_bytes: int, generation: bytes, key_digest: bytes) -> None:
        """Write a payload and let readers in. Raise OSError if there is no memory for it.

        Nobody sees half of it: until the end it has the name of its home, and the lock.
        """
        # FetchRequest of the kernel first: where it can't be had, that is an error here and no bus error while copying.
        self._allocate(HEADER_BYTES + size_bytes)
        small: list[Buffer] = []
        place = HEADER_BYTES
        for part in parts:
            if len(part) < _LARGE:
                small.append(part)
                continue
            place = self._write(small, place)
            small.clear()
            np.frombuffer(self._map, np.uint8, len(part), place)[:] = np.frombuffer(part, np.uint8)
            place += len(part)
        self._write(small, place)
        about = (State.READY, NOT_FETCHED, self._counted, size_bytes)
        HEADER.pack_into(self._map, 0, MAGIC, *about, *self._whose, generation, key_digest)
        self._is_locked = False
        if self._home is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def publish(self, path: str) -> None:
        """Give it the name under which readers look. What had that name is not found any more."""
        if self.path is not None:
            os.rename(self.path, path)  # noqa: PTH104 - names are plain text here
            self.path = path

    def hide(self) -> bool:
        """Take the name back, so that nobody new finds it. False if somebody was faster, or it was replaced."""
        if self.path is None or self._home is None or self.path == self._home:
            return True
        try:
            if not self._is_mine(self.path):
                return False
            os.rename(self.path, self._home)  # noqa: PTH104
        except OSError:
            return False
        self.path = self._home
        return True

    def withdraw(self) -> bool:
        """Hide it, and have readers that found it in time see that it holds nothing. False if its name is lost."""
        # One byte, so that nobody sees half of the change.
        os.pwrite(self._descriptor, _FREE, STATE_AT)
        if self.hide():
            return True
        # A reader that consumed it has given it the name of its home itself, unless it died over that.
        if self._home is not None and not self._is_mine(self._home):
            return False
        self.path = self._home
        return True

    @property
    def name(self) -> str:
        """The name without its folder; empty if it has none."""
        return "" if self.path is None else self.path.rpartition("/")[2]

    @property
    def fetched(self) -> bool:
        """Whether any reader has been there since it was filled."""
        return self._note() in (FETCHED, CONSUMED)

    @property
    def consumed(self) -> bool:
        """Whether a reader took it away from all others."""
        return self._note() == CONSUMED

    def note_fetched(self) -> None:
        """As a reader in another process does."""
        os.pwrite(self._descriptor, bytes([FETCHED]), FETCHED_AT)

    def view(self, size_bytes: int) -> memoryview:
        """The payload where it lies, to be released by the caller."""
        return memoryview(self._map)[HEADER_BYTES : HEADER_BYTES + size_bytes]

    def drop(self) -> None:
        """Give the memory back. Who still looks at it keeps seeing what is there."""
        # Said before the names are looked for: a reader that consumes it looks for this after it has given it one.
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, _GONE, STATE_AT)
        self._unlink()
        # A thread that sends from it lets go of the mapping when it is through.
        with contextlib.suppress(BufferError):
            self._map.close()
            # Readers keep files open that they look at no more; those must hold no memory.
            if self._home is not None and self._lock():
                os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)

    # What may be looked at at any time goes by the descriptor: should anybody cut the file short, that is no bus error.

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
        written = b"".join(small)
        self._map[place : place + len(written)] = written
        return place + len(written)

    def _allocate(self, up_to: int) -> None:
        if up_to > self._allocated:
            os.posix_fallocate(self._descriptor, self._allocated, up_to - self._allocated)
            self._allocated = up_to

    def _is_mine(self, path: str) -> bool:
        try:
            found = os.stat(path)  # noqa: PTH116
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
    """Segments that are free, at most ``keep_bytes`` of them. Used by any thread."""

    def __init__(self, directory: Path | None, keep_bytes: int, *, counted: bool = True) -> None:
        self._counted = counted
        self._directory = None if directory is None else str(directory)
        self._keep_bytes = keep_bytes
        self._lock = threading.Lock()
        self._free: dict[int, list[ShmBlock]] = {}
        self._free_bytes = 0
        self._closed = False
        self.made = 0

    def take_block(self, size_bytes: int) -> ShmBlock:
        """A segment for a payload of that size that nobody looks at. Raise OSError if there is no memory."""
        capacity = size_class(size_bytes)
        with self._lock:
            free = self._free.get(capacity, [])
            # The one that came back last is the likeliest to be still in the processor's cache.
            for position in range(len(free) - 1, max(len(free) - 1 - _TRIES, -1), -1):
                if free[position].try_lock() and free[position].is_whole():
                    self._free_bytes -= capacity
                    return free.pop(position)
        segment = ShmBlock(self._directory, capacity, counted=self._counted)
        if not segment.try_lock():
            segment.drop()
            raise OSError(errno.EBUSY, "a new segment is locked by somebody else")
        self.made += 1
        return segment

    def give_back(self, segment: ShmBlock) -> None:
        """Keep a segment for the next payload, or drop it."""
        if segment.withdraw() and segment.capacity >= KEPT_FROM_BYTES:
            segment.try_lock()
            with self._lock:
                if not self._closed and self._free_bytes + segment.capacity <= self._keep_bytes:
                    self._free.setdefault(segment.capacity, []).append(segment)
                    self._free_bytes += segment.capacity
                    return
        segment.drop()

    def trim(self) -> None:
        """Drop all that is free."""
        with self._lock:
            dropped = [segment for free in self._free.values() for segment in free]
            self._free.clear()
            self._free_bytes = 0
        for segment in dropped:
            segment.drop()

    def close(self) -> None:
        """Drop all that is free and keep nothing from now on. Idempotent."""
        self._closed = True
        self.trim()

    @property
    def free_bytes(self) -> int:
        """How much memory is kept for the next payloads."""
        return self._free_bytes
