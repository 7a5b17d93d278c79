"""Memory that hand-offs are received into, used again when nothing lives in it any more.

Fresh memory costs the kernel a fault for each page, which takes longer than receiving into it.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np

from stage_runtime.connectors.segments import KEPT_FROM_BYTES, size_class


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

    def take(self, size_bytes: int) -> PooledBuffer:
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
