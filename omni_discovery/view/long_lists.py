"""Long lists are read in a thread: records may be many and slow to read, and the loop keeps leases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from omni_discovery.kv import KeyValue, Listing
from omni_discovery.view.table import Delta, ReplicaTable

#: What a list may hold, in keys, values and so much for each, to be read at once.
_AT_ONCE_BYTES: Final = 2 << 20
_ITEM_BYTES: Final = 128

_Made = TypeVar("_Made")


async def fill(table: ReplicaTable, listing: Listing, at_s: float) -> Delta:
    """``table.replace``, of a long list in a thread.

    Nothing else may change the table meanwhile, nor use it once this was cancelled: the thread goes on.
    """
    if not _is_long(listing.items):
        return table.replace(listing, at_s)
    return await run_aside(table.replace, listing, at_s)


async def reconcile(table: ReplicaTable, listing: Listing, wall_s: Callable[[], float]) -> tuple[Delta, int]:
    """``table.reconcile``; where it has much to read, that is read in a thread before, while batches may be applied."""
    newer = table.newer(listing)
    ahead = await run_aside(table.read_ahead, newer) if _is_long(newer) else {}
    return table.reconcile(listing, wall_s(), ahead)


def _is_long(items: Iterable[KeyValue]) -> bool:
    return sum(_ITEM_BYTES + len(item.key) + len(item.value) for item in items) > _AT_ONCE_BYTES


async def run_aside(call: Callable[..., _Made], *arguments: Any) -> _Made:
    """Call it in a thread of its own."""
    # Not one of those of the loop, in which look-ups of names may hang.
    thread = ThreadPoolExecutor(1, "view")
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, call, *arguments)
    finally:
        thread.shutdown(wait=False)
