"""Hand-offs of a store in a region that a transfer library reads."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from stage_runtime.connectors.managed import Block, ManagedPool
from stage_runtime.connectors.serialization import Buffer


class ManagedPiece:
    """A hand-off of a store in a block. ``is_raw``: it is bytes or a tensor as they are, and no serialized object."""

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
        """Where its stamp begins, and behind that the hand-off."""
        return self.pool.address + self.block.offset

    def fill(self, parts: Sequence[Buffer], size_bytes: int, generation: bytes, key_digest: bytes) -> None:
        """See Piece."""
        self.pool.write(self.block, parts)

    def publish(self, path: str) -> None:
        """See Piece. Nobody finds it by a path."""

    def hide(self) -> bool:
        """See Piece."""
        return True

    def note_fetched(self) -> None:
        """See Piece."""
        self.fetched = True

    def view(self, size_bytes: int) -> memoryview:
        """See Piece."""
        self.pool.retain(self.block)
        return self.pool.view(self.block, size_bytes).payload()

    def drop(self) -> None:
        """See Piece. Who reads it now still holds it."""
        self._give_back()


class ManagedMemory:
    """The pool as a store sees it; ``pool`` has it made when it is needed first."""

    def __init__(self, pool: Callable[[], ManagedPool]) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._used: ManagedPool | None = None
        #: Not wanted any more, but read by somebody right now.
        self._leaving: list[ManagedPiece] = []

    @property
    def made(self) -> int:
        """See Memory."""
        return 0 if self._used is None else self._used.made

    @property
    def free_bytes(self) -> int:
        """See Memory."""
        self.trim()
        return 0 if self._used is None else self._used.free_bytes

    def take(self, size_bytes: int) -> ManagedPiece:
        """See Memory."""
        self.trim()
        self._used = self._pool()
        return ManagedPiece(self._used, self._used.allocate(size_bytes))

    def give_back(self, segment: Any) -> None:
        """See Memory. It stays until nobody reads it."""
        with self._lock:
            self._leaving.append(segment)
        self.trim()

    def trim(self) -> None:
        """See Memory."""
        with self._lock:
            done = [piece for piece in self._leaving if not piece.pins]
            self._leaving = [piece for piece in self._leaving if piece.pins]
        for piece in done:
            piece.drop()

    def close(self) -> None:
        """See Memory."""
        self.trim()
