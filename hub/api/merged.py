"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

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
