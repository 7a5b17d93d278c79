"""Notice a client that leaves, so that no stage works for nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from starlette.requests import Request

_Result = TypeVar("_Result")


class ClientLeftError(Exception):
    """The client closed its connection; what was under way for it has been cancelled."""


async def run_unless_left(request: Request, work: Coroutine[None, None, _Result]) -> _Result:
    """Await ``work``; cancel it and raise ClientLeftError when the client leaves first."""
    task = asyncio.create_task(work)
    left = asyncio.create_task(_left(request))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeftError
        return task.result()
    finally:
        await _end(task, left)


async def iterate_unless_left(request: Request, items: AsyncIterator[_Result]) -> AsyncIterator[_Result]:
    """Yield the items; end them and raise ClientLeftError when the client leaves."""
    left = asyncio.create_task(_left(request))
    pending: asyncio.Task[_Result | None] | None = None
    try:
        while True:
            pending = asyncio.create_task(_next(items))
            await asyncio.wait({pending, left}, return_when=asyncio.FIRST_COMPLETED)
            if not pending.done():
                raise ClientLeftError
            item = pending.result()
            if item is None:
                return
            yield item
    finally:
        await _end(left, *([pending] if pending else []))
        close = getattr(items, "aclose", None)
        if close is not None:
            await close()


async def _next(items: AsyncIterator[_Result]) -> _Result | None:
    return await anext(items, None)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Task[object]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError, Exception):
            await task
