"""Memory of hand-offs: blocks that a store keeps them in, buffers that they are received into, and loans.

``MemoryBlock`` and ``BlockPool`` are the interfaces of a store's memory, of any kind. ``ReceivePool`` reuses buffers,
because fresh memory costs a page fault for each page, which takes longer than receiving into it. ``Lent`` maps an
object returned by ``get`` to the memory that it lies in, so that the memory can be released early.
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
    """The memory of one stored hand-off. ``pins`` counts the readers under way; the store changes it under its lock."""

    pins: int
    #: The file under which other processes of this host map the block; None if they can't.
    path: str | None

    @property
    def name(self) -> str:
        """The path without its folder; empty without a path."""

    @property
    def fetched(self) -> bool:
        """Whether any reader has fetched the block since it was filled."""

    @property
    def consumed(self) -> bool:
        """Whether a reader has consumed the block, so that no other reader can fetch it."""

    def fill(self, parts: Sequence[Buffer], size_bytes: int, generation: bytes, key_digest: bytes) -> None:
        """Write a hand-off, ``parts`` one after the other. Raise OSError if there is no memory for it."""

    def publish(self, path: str) -> None:
        """Make the block visible to other processes under a path."""

    def hide(self) -> bool:
        """Remove the block's path, so that no further reader finds it by the key; False if it was consumed already."""

    def note_fetched(self) -> None:
        """Note that a reader has fetched the block."""

    def view(self, size_bytes: int) -> memoryview:
        """The first ``size_bytes`` of the hand-off, not copied; the caller has to release the view."""

    def drop(self) -> None:
        """Release the memory. Readers under way keep their view of it."""


class BlockPool(Protocol):
    """A source of memory blocks. Used by any thread."""

    @property
    def made(self) -> int:
        """How many blocks were made, or existed at the same time."""

    @property
    def free_bytes(self) -> int:
        """How many free bytes are kept for later hand-offs."""

    def take_block(self, size_bytes: int) -> MemoryBlock:
        """A block for ``size_bytes``, the caller's from now on. Raise OSError if there is no memory."""

    def give_back(self, segment: Any) -> None:
        """Return a block whose hand-off was dropped; it is reused or released once no reader is left."""

    def shrink(self) -> None:
        """Release the free memory that no hand-off has used since the last call."""

    def trim(self) -> None:
        """Release the free memory that is kept for later."""

    def close(self) -> None:
        """Release all free memory, and keep none from now on. Idempotent."""


class PooledBuffer(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes of a pool's buffer. Tensors made of it keep it alive; with the last of them the buffer goes back."""

    give_back: weakref.finalize[Any, Any]

    def payload(self) -> memoryview:
        """All its bytes, not copied."""
        return self.data

    def let_go(self) -> None:
        """Return the buffer to its pool now. Tensors that still lie in it may change from here on. Idempotent."""
        self.give_back()


class ReceivePool:
    """Buffers for receiving; free ones are kept for reuse, ``keep_bytes`` at most. Used by any thread."""

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._lock = threading.Lock()
        self._free: dict[int, list[mmap.mmap]] = {}
        self._free_bytes = 0
        #: Returned buffers. The garbage collector may append at any moment, so that takes no lock.
        self._returned: deque[mmap.mmap] = deque()

    def take_buffer(self, size_bytes: int) -> PooledBuffer:
        """A buffer of ``size_bytes``, returned with its last user. Raise OSError if there is no memory."""
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
        """Keep no free buffers from now on. Buffers in use stay valid. Idempotent."""
        with self._lock:
            self._keep_bytes = 0
            self._free.clear()
            self._free_bytes = 0

    @property
    def free_bytes(self) -> int:
        """How many bytes of free buffers are kept."""
        with self._lock:
            self._collect()
            return self._free_bytes

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            if len(block) >= KEPT_FROM_BYTES and self._free_bytes + len(block) <= self._keep_bytes:
                self._free.setdefault(len(block), []).append(block)
                self._free_bytes += len(block)


#: How many dead entries may collect before they are removed.
_GONE_AT_MOST: Final = 64


class Loan(Protocol):
    """Memory that an object lies in."""

    def let_go(self) -> None:
        """Release the memory for other use. Idempotent."""


class Lent:
    """Maps each object to the memory that it lies in, while any part of the object is alive. Used by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Not a WeakValueDictionary: making one of its entries takes as long as the rest of a small ``get``.
        self._loans: dict[int, weakref.ref[Any]] = {}
        self._look_at = _GONE_AT_MOST

    def note_loan(self, obj: Any, loan: Loan) -> None:
        """Note the memory of an object."""
        with self._lock:
            self._loans[id(obj)] = weakref.ref(loan)
            if len(self._loans) > self._look_at:
                self._loans = {key: each for key, each in self._loans.items() if each() is not None}
                self._look_at = 2 * len(self._loans) + _GONE_AT_MOST

    def release(self, obj: Any) -> None:
        """Release the memory of an object. An object without a noted memory is ignored."""
        with self._lock:
            found = self._loans.pop(id(obj), None)
        loan = None if found is None else found()
        if loan is not None:
            loan.let_go()

    def __len__(self) -> int:
        with self._lock:
            return sum(each() is not None for each in self._loans.values())
