"""List and watch: keep a local copy of some keys of the registry, through every failure.

The loop of client-go's reflector: list the keys, watch them from the next revision on, and list again whenever the
watch ends, after a pause that grows. What the keys mean is decided by the sink: ``Watcher`` keeps a table,
``ControlWatch`` obeys one control key, ``LeasedKey`` watches its own record.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Final, Protocol

from omni_discovery.backoff import Backoff
from omni_discovery.clock import Clock
from omni_discovery.kv import KVStore, Listing, WatchBatch

#: A watch that stood so long was a good one: the next failure is a new one.
_GOOD_WATCH_S: Final = 5.0
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 2.0


class WatchSink(Protocol):
    """Receives the state of the keys and its changes; all calls come from one task, one after the other."""

    async def replace(self, listing: Listing, asked_at_s: float) -> None:
        """Replace all keys by the result of a list request sent at ``asked_at_s``, monotonic; a watch follows."""

    async def apply(self, batch: WatchBatch) -> None:
        """Apply one batch of the watch, in revision order; the first is empty: the watch is open."""

    def on_watch_failed(self, error: Exception, log_level: int) -> None:
        """List or watch ended with ``error``, or a method of the sink raised it: the copy may be stale until the next
        ``replace``. ``log_level`` is WARNING for a failure of a new kind and DEBUG for a repeated one.
        """


def _nothing_beside() -> Sequence[Coroutine[Any, Any, None]]:
    return ()


async def list_and_watch(
    kv: KVStore,
    name: str,
    sink: WatchSink,
    *,
    is_prefix: bool,
    clock: Clock,
    jitter: Callable[[], float] = random.random,
    beside_watch: Callable[[], Sequence[Coroutine[Any, Any, None]]] = _nothing_beside,
    first: Listing | None = None,
) -> None:
    """Feed ``sink`` with the keys under ``name``, or with the key ``name`` alone. Ends only by cancellation.

    ``first`` is a listing of them that was read just now, in place of the first list.
    ``beside_watch`` makes coroutines that run while a watch stands; one that raises ends the watch, with its error.
    """
    backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, jitter)
    while True:
        began_s = clock.monotonic_s()
        try:
            listing, first = first, None
            if listing is None:
                listing = await (kv.list(name) if is_prefix else kv.list_key(name))
            await sink.replace(listing, began_s)
            start_revision = listing.revision + 1
            batches = kv.watch(name, start_revision) if is_prefix else kv.watch_key(name, start_revision)
            await first_to_end(_apply_batches(batches, sink), *beside_watch())
        except Exception as error:  # noqa: BLE001 - the sink logs it; a defect of its own must not end the loop
            sink.on_watch_failed(error, backoff.log_level(error))
        if clock.monotonic_s() - began_s > _GOOD_WATCH_S:
            backoff.reset()
        await clock.sleep(backoff.next_delay_s())


async def _apply_batches(watch: AsyncGenerator[WatchBatch, None], sink: WatchSink) -> None:
    async with aclosing(watch) as batches:
        async for batch in batches:
            await sink.apply(batch)


async def first_to_end(*works: Coroutine[Any, Any, None]) -> None:
    """Run coroutines together until one ends; cancel the others, and return or raise as that one did."""
    if len(works) == 1:
        await works[0]
        return
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
