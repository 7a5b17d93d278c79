"""A region of memory that a transfer library reads and writes, cut into blocks with reference counts.

A block is freed when its last holder lets go: the store that offers it, each reader under way, a ``ManagedBuffer``,
and an object that lies in it. So one sender may serve any number of receivers. ``ManagedBlockPool`` is the region as a
store sees it, ``BufferAllocator`` knows which parts of it are free.
"""

from __future__ import annotations

import bisect
import errno
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from omni_discovery.errors import ConfigError
from stage_runtime.connectors import serialization
from stage_runtime.connectors.serialization import Buffer
from stage_runtime.connectors.store.memory import PooledBuffer

_ALIGNMENT: Final = 4096


class BufferAllocator:
    """Offsets in a region of ``size_bytes``: first fit, free neighbours are joined. Used by any thread."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._lock = threading.Lock()
        #: Free stretches as (offset, size), by offset; no two of them touch.
        self._free = [(0, size_bytes)]

    def allocate(self, size_bytes: int) -> tuple[int, int] | None:
        """Offset and size of a block for ``size_bytes``, rounded up to 4096; None if no free stretch is that long."""
        wanted = max(-(-size_bytes // _ALIGNMENT), 1) * _ALIGNMENT
        with self._lock:
            for position, (offset, size) in enumerate(self._free):
                if size >= wanted:
                    self._free[position : position + 1] = [(offset + wanted, size - wanted)] if size > wanted else []
                    return offset, wanted
        return None

    def free(self, offset: int, size_bytes: int) -> None:
        """Free a block of ``allocate``. Raise ValueError, and free nothing, if a part of it is free already."""
        with self._lock:
            position = bisect.bisect(self._free, (offset, 0))
            start, end = offset, offset + size_bytes
            free_before = sum(self._free[position - 1]) if position else 0
            following = position
            free_after = self._free[following][0] if following < len(self._free) else self.size_bytes
            if size_bytes <= 0 or start < free_before or end > free_after:
                raise ValueError(
                    f"the {size_bytes} bytes at {offset} are no block in use: a part of them is free already, or "
                    f"outside of the {self.size_bytes} bytes"
                )
            if position and free_before == start:
                position -= 1
                start = self._free[position][0]
            if following < len(self._free) and free_after == end:
                end += self._free[following][1]
                following += 1
            self._free[position:following] = [(start, end - start)]

    @property
    def free_bytes(self) -> int:
        """All free bytes, in any number of stretches."""
        with self._lock:
            return sum(size for _, size in self._free)


#: Length of the random stamp before the content of a block, by which a reader verifies that it read the offered block.
STAMP_BYTES: Final = 64
_CHANCE_BYTES: Final = 32


def flat_tensor(content: serialization.Buffer) -> Any:
    """A copy of bytes as a tensor of uint8, of shape [bytes]."""
    import torch

    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if len(content) else torch.empty(0).byte()


class Block:
    """A part of a pool: a stamp, then the content. Made by the pool, with one holder."""

    def __init__(self, offset: int, size_bytes: int) -> None:
        self.offset = offset
        self.size_bytes = size_bytes
        self.start = offset + STAMP_BYTES
        self.stamp = b""
        #: The reference count; changed by the pool only.
        self.holders = 1


class ManagedPool:
    """The region: CPU memory, pinned if there is a GPU, or memory of a device. Used by any thread.

    The constructor raises ConfigError if the memory can't be allocated.
    """

    def __init__(self, size_bytes: int, device: str = "cpu") -> None:
        import torch

        try:
            pinned = device == "cpu" and torch.cuda.is_available()
            self.tensor = torch.empty(size_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(f"memory_pool_size {size_bytes} on {device!r} can't be had: {error}") from error
        self.address: int = self.tensor.data_ptr()
        self.size_bytes = size_bytes
        self.is_host = self.tensor.is_cpu
        self.allocator = BufferAllocator(size_bytes)
        #: The largest number of blocks at one time.
        self.made = 0
        self._array = self.tensor.numpy() if self.is_host else np.empty(0, np.uint8)
        self._lock = threading.Lock()
        self._held = 0
        #: One entry for each holder that let go. The garbage collector may append at any moment, so that takes no lock.
        self._let_go: deque[Block] = deque()

    def allocate(self, size_bytes: int) -> Block:
        """A block for ``size_bytes`` of content, held by the caller. Raise OSError if no free stretch is that long."""
        with self._lock:
            self._collect()
            found = self.allocator.allocate(STAMP_BYTES + size_bytes)
            if found is None:
                raise OSError(
                    errno.ENOBUFS,
                    f"{size_bytes} bytes do not fit into the pool, {self.allocator.free_bytes} of {self.size_bytes} "
                    "are free: raise memory_pool_size, or release what was fetched sooner",
                )
            self._held += 1
            self.made = max(self.made, self._held)
        block = Block(*found)
        self.stamp(block)
        return block

    def stamp(self, block: Block) -> None:
        """Write a new random stamp before a block's content."""
        block.stamp = os.urandom(_CHANCE_BYTES).ljust(STAMP_BYTES, b"\0")
        self._copy(block.offset, block.stamp)

    def has_stamp(self, block: Block, stamp: bytes) -> bool:
        """Whether a block's content follows that stamp."""
        found: bytes = self.tensor[block.offset : block.start].cpu().numpy().tobytes()
        return found == stamp

    def retain(self, block: Block) -> None:
        """Add a holder of a block."""
        with self._lock:
            block.holders += 1

    def let_go(self, block: Block) -> None:
        """Remove a holder of a block; the last one frees it."""
        self._let_go.append(block)

    def view(self, block: Block, size_bytes: int) -> PooledBuffer:
        """The first ``size_bytes`` of a block as an array, which becomes a holder in place of the caller.

        Of memory of a device, the array is a copy and the block is let go at once.
        """
        if self.is_host:
            buffer = self._array[block.start : block.start + size_bytes].view(PooledBuffer)
            buffer.give_back = weakref.finalize(buffer, self.let_go, block)
        else:
            buffer = self.slice(block, size_bytes).cpu().numpy().view(PooledBuffer)
            self.let_go(block)
            buffer.give_back = weakref.finalize(buffer, int)
        buffer.give_back.atexit = False
        return buffer

    def slice(self, block: Block, size_bytes: int) -> Any:
        """The first ``size_bytes`` of a block as a tensor of uint8, which is not a holder."""
        return self.tensor[block.start : block.start + size_bytes]

    def write(self, block: Block, parts: Sequence[serialization.Buffer]) -> None:
        """Copy parts into a block, one after the other."""
        place = block.start
        for part in parts:
            self._copy(place, part)
            place += len(part)

    @property
    def free_bytes(self) -> int:
        """All free bytes."""
        with self._lock:
            self._collect()
            return self.allocator.free_bytes

    def _copy(self, place: int, part: serialization.Buffer) -> None:
        if not len(part):
            return
        if self.is_host:
            np.copyto(self._array[place : place + len(part)], np.frombuffer(part, np.uint8))
        else:
            self.tensor[place : place + len(part)].copy_(flat_tensor(part))

    def _collect(self) -> None:
        while self._let_go:
            block = self._let_go.popleft()
            block.holders -= 1
            if not block.holders:
                self._held -= 1
                self.allocator.free(block.offset, block.size_bytes)


class ManagedBuffer:
    """A holder of a block that ``get`` filled, or that a producer fills before ``put``.

    ``release`` it, or leave that to the garbage collector.
    """

    def __init__(self, pool: ManagedPool, block: Block, size_bytes: int) -> None:
        self.pool = pool
        self.block = block
        self.size = size_bytes
        self._give_back = weakref.finalize(self, pool.let_go, block)
        self._give_back.atexit = False

    @property
    def tensor(self) -> Any:
        """The buffer as a tensor of uint8, of shape [bytes], in the pool. Raise ValueError after ``release``."""
        if not self._give_back.alive:
            raise ValueError("the buffer was released")
        return self.pool.slice(self.block, self.size)

    def as_tensor(self, dtype: Any, shape: Sequence[int]) -> Any:
        """The buffer as a tensor of that dtype and shape, in the pool. Raise ValueError if the sizes differ."""
        try:
            return self.tensor.view(dtype).reshape(tuple(shape))
        except RuntimeError as error:
            raise ValueError(f"{self.size} bytes are no {dtype} of shape {tuple(shape)}") from error

    def to_bytes(self) -> bytes:
        """A copy of its bytes."""
        content: bytes = self.tensor.cpu().numpy().tobytes()
        return content

    def __len__(self) -> int:
        return self.size

    def hand_on(self) -> Block:
        """The block; the caller becomes its holder in place of this buffer. Raise ValueError after ``release``."""
        if self._give_back.detach() is None:
            raise ValueError("the buffer was released")
        return self.block

    def retain(self) -> ManagedBuffer:
        """Another holder of the same block, with a ``release`` of its own. Raise ValueError after ``release``."""
        if not self._give_back.alive:
            raise ValueError("the buffer was released")
        self.pool.retain(self.block)
        return ManagedBuffer(self.pool, self.block, self.size)

    def release(self) -> None:
        """Let the block go; tensors of it must not be used any more. Idempotent."""
        self._give_back()

    def let_go(self) -> None:
        """As ``release``."""
        self.release()

    def __enter__(self) -> ManagedBuffer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class PoolBlock:
    """See MemoryBlock; a holder of a pool's block. ``is_raw``: the content is bytes or a tensor, not serialized."""

    path: str | None = None
    name = ""
    consumed = False

    def __init__(self, pool: ManagedPool, block: Block, *, is_raw: bool = False) -> None:
        self.pool = pool
        self.block = block
        self.is_raw = is_raw
        self.pins = 0
        self.fetched = False
        self._give_back = weakref.finalize(self, pool.let_go, block)
        self._give_back.atexit = False

    @property
    def address(self) -> int:
        """The address of its stamp, which the content follows."""
        return self.pool.address + self.block.offset

    def fill(self, parts: Sequence[Buffer], size_bytes: int, generation: bytes, key_digest: bytes) -> None:
        """See MemoryBlock."""
        self.pool.write(self.block, parts)

    def publish(self, path: str) -> None:
        """See MemoryBlock. Does nothing: it has no path."""

    def hide(self) -> bool:
        """See MemoryBlock."""
        return True

    def note_fetched(self) -> None:
        """See MemoryBlock."""
        self.fetched = True

    def view(self, size_bytes: int) -> memoryview:
        """See MemoryBlock."""
        self.pool.retain(self.block)
        return self.pool.view(self.block, size_bytes).payload()

    def drop(self) -> None:
        """See MemoryBlock. Readers under way are holders of their own."""
        self._give_back()


class ManagedBlockPool:
    """See BlockPool. ``pool`` returns the region, and is called when it is needed first."""

    def __init__(self, pool: Callable[[], ManagedPool]) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._used: ManagedPool | None = None
        #: Dropped blocks that are still being read.
        self._leaving: list[PoolBlock] = []

    @property
    def made(self) -> int:
        """See BlockPool."""
        return 0 if self._used is None else self._used.made

    @property
    def free_bytes(self) -> int:
        """See BlockPool."""
        self.trim()
        return 0 if self._used is None else self._used.free_bytes

    def take_block(self, size_bytes: int) -> PoolBlock:
        """See BlockPool."""
        self.trim()
        self._used = self._pool()
        return PoolBlock(self._used, self._used.allocate(size_bytes))

    def give_back(self, segment: Any) -> None:
        """See BlockPool. The block is freed when its last reader has ended."""
        with self._lock:
            self._leaving.append(segment)
        self.trim()

    def shrink(self) -> None:
        """See BlockPool. The memory is registered once, and stays."""

    def trim(self) -> None:
        """See BlockPool."""
        with self._lock:
            done = [block for block in self._leaving if not block.pins]
            self._leaving = [block for block in self._leaving if block.pins]
        for block in done:
            block.drop()

    def close(self) -> None:
        """See BlockPool."""
        self.trim()
