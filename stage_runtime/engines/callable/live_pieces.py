"""Pieces of a hand-off that user code reads as they come: ``async for piece in pieces``, without an event loop.

An asynchronous generator is driven by hand. Where it asks for a piece that has not come, it stands still, at no cost,
until the engine is fed the next one.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator
from inspect import CORO_SUSPENDED, getcoroutinestate
from typing import Any, Final

#: So many pieces are taken before user code has read the first of them.
_AHEAD: Final = 4


class _Awaited:
    """Given to whoever drives the coroutine: a value that came out or, without one, that a piece is missing."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __await__(self) -> Generator[_Awaited, None, None]:
        yield self


class LivePieces(AsyncIterator[Any]):
    """The pieces of one hand-off. ``read`` checks and converts each as it is fed."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read
        self._unread: deque[Any] = deque()
        self._is_whole = False

    @property
    def wants(self) -> bool:
        """Whether it is worth fetching another piece now."""
        return len(self._unread) < _AHEAD

    @property
    def has_news(self) -> bool:
        """Whether who waits for a piece can go on."""
        return bool(self._unread) or self._is_whole

    def put(self, piece: Any) -> None:
        """The next piece has come. Raise InvalidRequestError if it is wrong."""
        self._unread.append(self._read(piece))

    def end(self) -> None:
        """No more pieces come."""
        self._is_whole = True

    async def __anext__(self) -> Any:
        while not self.has_news:
            await _Awaited()
        if not self._unread:
            raise StopAsyncIteration
        return self._unread.popleft()


class Driven:
    """An asynchronous generator, advanced step by step; it may wait for nothing but its pieces."""

    def __init__(self, made: AsyncGenerator[Any, None]) -> None:
        self._run: Coroutine[Any, None, None] = _run(made)

    def advance(self) -> tuple[Any, ...]:
        """The next value; nothing if a piece has to come first. Raise StopIteration at the end, and what it raises."""
        awaited = self._run.send(None)
        if not isinstance(awaited, _Awaited):
            raise TypeError(f"it awaits a {type(awaited).__name__}; only its pieces can be awaited here")
        return awaited.values

    def close(self) -> None:
        """Stop it where it stands: its ``finally`` runs. Raise what that raises."""
        if getcoroutinestate(self._run) != CORO_SUSPENDED:
            self._run.close()
            return
        try:
            # Python 3.11 closes no asynchronous generator that waits; an error does reach it.
            self._run.throw(CancelledError())
        except (CancelledError, StopIteration):
            return
        raise RuntimeError("it was cancelled and goes on")


async def _run(made: AsyncGenerator[Any, None]) -> None:
    async for value in made:
        try:
            await _Awaited(value)
        except CancelledError:
            await made.aclose()
            raise
