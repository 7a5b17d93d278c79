"""What a store needs of the memory that it keeps hand-offs in, wherever that is.

Memory that hand-offs are received into, used again when nothing lives in it any more.

Fresh memory costs the kernel a fault for each page, which takes longer than receiving into it.

Memory lent to the objects that ``get`` returned, so that it can be taken back early.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np

from stage_runtime.connectors.serialization import Buffer
from stage_runtime.connectors.store.shm_blocks import KEPT_FROM_BYTES, size_class


class MemoryBlock(Protocol):
    """Memory of one hand-off. ``pins`` counts who reads it right now; only the store changes that, under its lock."""

    pins: int
    #: Where others of this host find it; None if they can't.
    path: str | None

    @property
    def name(self) -> str:
        """The path without its folder; empty if there is none."""

    @property
    def fetched(self) -> bool:
        """Whether any reader has been there since it was filled."""

    @property
    def consumed(self) -> bool:
        """Whether a reader took it away from all others."""

    def fill(self, parts: Sequence[Buffer], size_bytes: int, generation: bytes, key_digest: bytes) -> None:
        """Write a hand-off. Raise OSError if there is no room for it."""

    def publish(self, path: str) -> None:
        """Give it a path."""

    def hide(self) -> bool:
        """Keep those away who know only the key; False if it is gone already."""

    def note_fetched(self) -> None:
        """A reader has been there."""

    def view(self, size_bytes: int) -> memoryview:
        """The hand-off where it lies, to be released by the caller."""

    def drop(self) -> None:
        """Give the memory back."""


class BlockPool(Protocol):
    """Where pieces come from. Used by any thread."""

    @property
    def made(self) -> int:
        """How many pieces it took to hold what was there at one time."""

    @property
    def free_bytes(self) -> int:
        """How much is kept for what comes next."""

    def take_block(self, size_bytes: int) -> MemoryBlock:
        """A piece for so many bytes. Raise OSError if there is none."""

    def give_back(self, segment: Any) -> None:
        """The hand-off in a piece is not wanted any more."""

    def trim(self) -> None:
        """Drop what is kept for later."""

    def close(self) -> None:
        """Keep nothing from now on. Idempotent."""


class PooledBuffer(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes of a block of a pool. Tensors made of it keep it alive; with the last of them the block goes back."""

    give_back: weakref.finalize[Any, Any]

    def payload(self) -> memoryview:
        """All of them."""
        return self.data

    def let_go(self) -> None:
        """Let the block be used again now. What still lies in it may change from here on. Idempotent."""
        self.give_back()


class ReceivePool:
    """Blocks that are free, at most ``keep_bytes`` of them. Used by any thread."""

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._lock = threading.Lock()
        self._free: dict[int, list[mmap.mmap]] = {}
        self._free_bytes = 0
        #: Blocks that went back. The garbage collector may add to it at any moment, so that takes no lock.
        self._returned: deque[mmap.mmap] = deque()

    def take_buffer(self, size_bytes: int) -> PooledBuffer:
        """Memory for so many bytes. Raise OSError if there is none."""
        capacity = size_class(size_bytes)
        with self._lock:
            self._collect()
            free = self._free.get(capacity)
            block = free.pop() if free else None
            if block is not None:
                self._free_bytes -= capacity
        if block is None:
            block = mmap.mmap(-1, capacity)
        buffer = np.frombuffer(block, np.uint8, size_bytes).view(PooledBuffer)
        buffer.give_back = weakref.finalize(buffer, self._returned.append, block)
        buffer.give_back.atexit = False
        return buffer

    def close(self) -> None:
        """Keep nothing from now on. What was taken stays valid. Idempotent."""
        with self._lock:
            self._keep_bytes = 0
            self._free.clear()
            self._free_bytes = 0

    @property
    def free_bytes(self) -> int:
        """How much memory is kept for what comes next."""
        with self._lock:
            self._collect()
            return self._free_bytes

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            if len(block) >= KEPT_FROM_BYTES and self._free_bytes + len(block) <= self._keep_bytes:
                self._free.setdefault(len(block), []).append(block)
                self._free_bytes += len(block)


#: So many may be remembered that are gone already, before they are looked for.
_GONE_AT_MOST: Final = 64


class Loan(Protocol):
    """Memory that an object lies in."""

    def let_go(self) -> None:
        """Use it for something else from now on. Idempotent."""


class Lent:
    """Which object lies in which memory, for as long as anything of it lives. Used by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Not a WeakValueDictionary: that takes as long for one of these as all else that a small ``get`` does.
        self._loans: dict[int, weakref.ref[Any]] = {}
        self._look_at = _GONE_AT_MOST

    def note_loan(self, obj: Any, loan: Loan) -> None:
        """Remember the memory of an object."""
        with self._lock:
            self._loans[id(obj)] = weakref.ref(loan)
            if len(self._loans) > self._look_at:
                self._loans = {key: each for key, each in self._loans.items() if each() is not None}
                self._look_at = 2 * len(self._loans) + _GONE_AT_MOST

    def release(self, obj: Any) -> None:
        """Let the memory of an object go. An object that lies in none is fine."""
        with self._lock:
            found = self._loans.pop(id(obj), None)
        loan = None if found is None else found()
        if loan is not None:
            loan.let_go()

    def __len__(self) -> int:
        with self._lock:
            return sum(each() is not None for each in self._loans.values())
