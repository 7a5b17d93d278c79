"""How much one HTTP request may have replicas do, and how much of that is under way at once.

vLLM's server asks its engine for all texts, or prompts, of a request at the same time, and has it queue them. A hub
would turn away what comes beyond its bounds, and with it the whole request, however often it is sent again.

Several streams as one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, TypeVar

from omni_discovery.errors import InvalidRequestError

#: How many requests to replicas an HTTP request may have under way. A hub that has nothing else to do takes as many.
MAX_AT_ONCE: Final = 1024
#: How many it may have asked: those that wait for the others take memory, too.
MAX_IN_ALL: Final = 16384


@dataclass(slots=True)
class _Turns:
    free: asyncio.Semaphore
    #: How many were asked that have not ended.
    asked: int = 0


_turns: Final[ContextVar[_Turns | None]] = ContextVar("turns", default=None)


def begin() -> None:
    """An HTTP request begins, and all that is done in its context is its own."""
    _turns.set(_Turns(asyncio.Semaphore(MAX_AT_ONCE)))


def ask(requests: int) -> None:
    """It asks for so many requests more. Raise InvalidRequestError if those are too many with the ones before."""
    turns = _turns.get()
    if turns is not None:
        turns.asked += requests
        if turns.asked > MAX_IN_ALL:
            raise InvalidRequestError(
                f"one request may come to {MAX_IN_ALL} texts, or prompts with 'n' answers each; send several requests"
            )


@asynccontextmanager
async def turn() -> AsyncIterator[None]:
    """What to hold while one of the requests that were asked is under way. Waits until it may be."""
    turns = _turns.get()
    if turns is None:
        yield
        return
    try:
        async with turns.free:
            yield
    finally:
        turns.asked -= 1


_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class _End:
    error: Exception | None


async def merged(streams: Sequence[AsyncGenerator[_Item, None]]) -> AsyncGenerator[tuple[int, _Item], None]:
    """Give the items of all streams as they come, each with its stream's position.

    The first error ends all, and so does closing this one early. A slow reader holds the streams back.
    """
    items: asyncio.Queue[tuple[int, _Item] | _End] = asyncio.Queue(2 * len(streams))
    tasks = [asyncio.create_task(_pump(position, stream, items)) for position, stream in enumerate(streams)]
    left = len(tasks)
    try:
        while left:
            item = await items.get()
            if not isinstance(item, _End):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                left -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    position: int, stream: AsyncGenerator[_Item, None], items: asyncio.Queue[tuple[int, _Item] | _End]
) -> None:
    error: Exception | None = None
    try:
        async with aclosing(stream):
            async for item in stream:
                await items.put((position, item))
    except Exception as caught:  # noqa: BLE001 - it is raised where the items are read
        error = caught
    await items.put(_End(error))
