"""Drives a ReplicaTable: list, watch, and list again whenever the watch can't go on."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any, Final

from omni_discovery.backoff import Backoff
from omni_discovery.clock import Clock, SystemClock
from omni_discovery.errors import CompactedError, RegistryError, RegistryUnavailableError
from omni_discovery.kv import KVStore
from omni_discovery.view.anti_entropy import NotProvedError, Upkeep, UpkeepOptions
from omni_discovery.view.table import Delta, ReplicaTable, View

logger = logging.getLogger(__name__)

#: A watch that stood so long was a good one: the next failure is a new one.
_GOOD_WATCH_S: Final = 5.0

OnView = Callable[[View, Delta], None]


class Watcher:
    """Keeps a table equal to everything under ``prefix``.

    ``on_view`` comes on the watcher's loop with the first list, each change, and when the table turns stale or fresh
    (then with an empty delta). What it raises is logged and changes nothing.
    """

    def __init__(
        self,
        kv: KVStore,
        table: ReplicaTable,
        prefix: str,
        on_view: OnView,
        *,
        clock: Clock | None = None,
        jitter: Callable[[], float] = random.random,
        options: UpkeepOptions | None = None,
    ) -> None:
        self._kv = kv
        self._table = table
        self._prefix = prefix
        self._on_view = on_view
        self._clock = clock or SystemClock()
        self._backoff = Backoff(0.05, 2.0, jitter)
        self._count = (options or UpkeepOptions()).count
        self._upkeep = Upkeep(
            kv,
            table,
            prefix,
            lambda delta: self._deliver(table.snapshot(), delta),
            self._clock,
            options or UpkeepOptions(),
            jitter,
        )
        self._task: asyncio.Task[None] | None = None
        self._has_told_stale = False

    def start(self) -> None:
        """Begin to watch; returns at once."""
        self._task = asyncio.create_task(self._run(), name=f"watcher-{self._prefix}")

    async def close(self) -> None:
        """Stop watching. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            began_s = self._clock.monotonic_s()
            try:
                await self._list_and_watch()
            except CompactedError as error:
                # The registry answers; only our place in its history is gone.
                logger.info("watcher.relist prefix=%s reason=%s", self._prefix, error)
            except NotProvedError as error:
                self._turn_stale(error, self._clock.monotonic_s() - error.fresh_at_s)
            except RegistryError as error:
                self._turn_stale(error)
            except Exception as error:
                logger.exception("watcher.failed prefix=%s", self._prefix)
                self._turn_stale(error)
            if self._clock.monotonic_s() - began_s > _GOOD_WATCH_S:
                self._backoff.reset()
            await self._clock.sleep(self._backoff.next_delay_s())

    async def _list_and_watch(self) -> None:
        asked_at_s = self._clock.monotonic_s()
        listing = await self._kv.list(self._prefix)
        before = self._table.snapshot()
        delta = self._table.replace(listing, self._clock.wall_s())
        after = self._table.snapshot()
        if before.stale_since_s is not None:
            level = logging.INFO if self._has_told_stale else logging.DEBUG
            logger.log(level, "watcher.fresh prefix=%s revision=%d", self._prefix, listing.revision)
            self._has_told_stale = False
        if delta or after.bad is not before.bad or before.revision == 0 or before.stale_since_s is not None:
            self._deliver(after, delta)
        if before.revision:
            self._count("relist")
        self._upkeep.opened(asked_at_s)
        await _first_to_end(self._follow(listing.revision + 1), self._upkeep.prove(), self._upkeep.tend())

    async def _follow(self, start_revision: int) -> None:
        async with aclosing(self._kv.watch(self._prefix, start_revision)) as batches:
            async for batch in batches:
                before = self._table.snapshot()
                delta = self._table.apply(batch, self._clock.wall_s())
                after = self._table.snapshot()
                # A bad value that went away changes no replica, but the view shows it no longer.
                if delta or after.bad is not before.bad:
                    self._deliver(after, delta)
                self._upkeep.heard(batch, delta)

    def _turn_stale(self, error: Exception, for_s: float = 0.0) -> None:
        # That etcd is away, its connection says.
        self._tell_stale(error, is_news=type(error) is not RegistryUnavailableError)
        if self._table.mark_stale(self._clock.wall_s() - for_s):
            self._deliver(self._table.snapshot(), Delta())

    def _tell_stale(self, error: Exception, *, is_news: bool) -> None:
        if is_news and not self._has_told_stale:
            self._has_told_stale = True
            logger.warning("watcher.stale prefix=%s reason=%s", self._prefix, error)
        else:
            logger.debug("watcher.stale prefix=%s reason=%s", self._prefix, error)

    def _deliver(self, view: View, delta: Delta) -> None:
        for bad in delta.bad:
            self._count("bad_value")
            logger.warning("watcher.bad_value key=%s reason=%s", bad.key, bad.reason)
        try:
            self._on_view(view, delta)
        except Exception:
            logger.exception("watcher.listener_failed prefix=%s", self._prefix)


async def _first_to_end(*works: Coroutine[Any, Any, None]) -> None:
    """Run these together until one ends; then end the others, and end as that one did."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
