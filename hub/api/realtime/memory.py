"""SoundMemory: the memory that all sessions of a hub take together. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from omni_discovery.errors import OverloadedError


class SoundMemory:
    """How many bytes each session holds, of ``most`` for all."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[Hashable, int] = {}
        self.held_bytes = 0

    @contextmanager
    def room_for(self, size_bytes: int) -> Iterator[None]:
        """Keep room for so many bytes more, until their session holds them. Raise OverloadedError if there is none."""
        if self.held_bytes + size_bytes > self._most:
            raise OverloadedError("the conversations of this hub take all memory that they may: try again later", 5.0)
        self.held_bytes += size_bytes
        try:
            yield
        finally:
            self.held_bytes -= size_bytes

    def hold(self, session: Hashable, size_bytes: int) -> None:
        """Note what a session holds now."""
        self.held_bytes += size_bytes - self._held.get(session, 0)
        self._held[session] = size_bytes

    def release(self, session: Hashable) -> None:
        """A session has ended. Idempotent."""
        self.held_bytes -= self._held.pop(session, 0)
