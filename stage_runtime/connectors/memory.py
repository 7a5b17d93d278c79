"""What a store needs of the memory that it keeps hand-offs in, wherever that is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from stage_runtime.connectors.serialization import Buffer


class Piece(Protocol):
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


class Memory(Protocol):
    """Where pieces come from. Used by any thread."""

    @property
    def made(self) -> int:
        """How many pieces it took to hold what was there at one time."""

    @property
    def free_bytes(self) -> int:
        """How much is kept for what comes next."""

    def take(self, size_bytes: int) -> Piece:
        """A piece for so many bytes. Raise OSError if there is none."""

    def give_back(self, segment: Any) -> None:
        """The hand-off in a piece is not wanted any more."""

    def trim(self) -> None:
        """Drop what is kept for later."""

    def close(self) -> None:
        """Keep nothing from now on. Idempotent."""
