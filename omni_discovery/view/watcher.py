"""Watcher: keeps a ReplicaTable equal to the registry, by list_and_watch and by anti-entropy."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from omni_discovery.clock import Clock, SystemClock
from omni_discovery.errors import CompactedError, RecordError, RegistryError, RegistryUnavailableError
from omni_discovery.kv import KVStore, Listing, WatchBatch
from omni_discovery.list_watch import list_and_watch
from omni_discovery.log_once import LinePace, LogOnce
from omni_discovery.text import shortened
from omni_discovery.view.anti_entropy import AntiEntropy, AntiEntropyOptions
from omni_discovery.view.long_lists import fill
from omni_discovery.view.table import Delta, ReplicaTable, View, shows_other_keys

logger = logging.getLogger(__name__)

#: A value that can't be read is logged again after so long, if it is still written; so many at once, then one a second;
#: and so much of its key.
BAD_AGAIN_S: Final = 600.0
_MOST_BAD_LINES: Final = 8
_KEY_CHARS: Final = 200

OnView = Callable[[View, Delta], None]


class Watcher:
    """Keeps a table equal to all keys under ``prefix``.

    ``on_view(view, delta)`` is called on the watcher's loop with the first list, at each change, and when the table
    turns stale or fresh (then with an empty delta). ``delta.since_revision`` is the revision of the view delivered
    before. An exception from ``on_view`` is logged and changes nothing.

    With beats, a view is stale since its last proof, whatever ended the watch. Without them, it is stale since the end
    of the watch.
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
        options: AntiEntropyOptions | None = None,
    ) -> None:
        self._kv = kv
        self._table = table
        self._prefix = prefix
        self._on_view = on_view
        self._clock = clock or SystemClock()
        self._jitter = jitter
        self._count = (options or AntiEntropyOptions()).count
        self._anti_entropy = AntiEntropy(
            kv,
            table,
            prefix,
            lambda delta: self._deliver(table.snapshot(), delta),
            self._clock,
            options or AntiEntropyOptions(),
            jitter,
        )
        self._task: asyncio.Task[None] | None = None
        #: Turns the view stale if the list after a compaction does not come in time.
        self._relist_alarm: asyncio.Task[None] | None = None
        self._log_once = LogOnce(self._clock.monotonic_s)
        self._bad_lines = LinePace(self._clock.monotonic_s, _MOST_BAD_LINES)
        #: The revision of the view delivered last; None before the first. A table may be ahead, by keys in no view.
        self._delivered_revision: int | None = None

    def start(self) -> None:
        """Begin to watch; returns at once."""
        self._task = asyncio.create_task(
            list_and_watch(
                self._kv,
                self._prefix,
                self,
                is_prefix=True,
                clock=self._clock,
                jitter=self._jitter,
                beside_watch=lambda: (self._anti_entropy.prove_freshness(), self._anti_entropy.compare_with_registry()),
            ),
            name=f"watcher-{self._prefix}",
        )

    async def close(self) -> None:
        """Stop watching. Idempotent."""
        self._stop_relist_alarm()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def replace(self, listing: Listing, asked_at_s: float) -> None:
        """See WatchSink."""
        # While the table is filled, nothing else changes it.
        self._stop_relist_alarm()
        before = self._table.snapshot()
        delta = await fill(self._table, listing, self._clock.wall_s())
        after = self._table.snapshot()
        self._anti_entropy.watch_opened(asked_at_s)
        if before.stale_since_s is not None:
            level = logging.INFO if self._log_once.forget("stale") else logging.DEBUG
            logger.log(level, "watcher.fresh prefix=%s revision=%d", self._prefix, listing.revision)
        self._log_refused(after)
        is_first = before.revision == 0 or before.stale_since_s is not None
        if delta or is_first or shows_other_keys(before, after):
            self._deliver(after, delta)
        if before.revision:
            self._count("relist")

    async def apply(self, batch: WatchBatch) -> None:
        """See WatchSink."""
        before = self._table.snapshot()
        delta = self._table.apply(batch, self._clock.wall_s())
        after = self._table.snapshot()
        self._log_refused(after)
        if delta or shows_other_keys(before, after):
            self._deliver(after, delta)
        self._anti_entropy.batch_applied(batch, delta)

    def on_watch_failed(self, error: Exception, log_level: int) -> None:
        """See WatchSink."""
        if isinstance(error, CompactedError):
            # The registry answers: the view is not stale, only the revision to watch from is gone.
            logger.info("watcher.relist prefix=%s reason=%s", self._prefix, error)
            view = self._table.snapshot()
            is_fresh = view.revision > 0 and view.stale_since_s is None
            if self._relist_alarm is None and self._anti_entropy.is_proving and is_fresh:
                self._relist_alarm = asyncio.create_task(self._await_relist(error))
            return
        if not isinstance(error, RegistryError):
            logger.error("watcher.failed prefix=%s", self._prefix, exc_info=error)
        self._turn_stale(error)

    async def _await_relist(self, error: Exception) -> None:
        await self._clock.sleep(max(0.0, self._anti_entropy.stale_at_s - self._clock.monotonic_s()))
        self._turn_stale(error)

    def _stop_relist_alarm(self) -> None:
        alarm, self._relist_alarm = self._relist_alarm, None
        if alarm is not None:
            alarm.cancel()

    def unproved_s(self) -> float:
        """For how many seconds the view has had no proof; 0 without beats, and before the first list."""
        if not self._anti_entropy.is_proving or not self._table.snapshot().revision:
            return 0.0
        return max(0.0, self._clock.monotonic_s() - self._anti_entropy.fresh_at_s)

    def _turn_stale(self, error: Exception) -> None:
        # An etcd that is away is logged by its connection.
        is_news = type(error) is not RegistryUnavailableError and self._log_once.should("stale")
        level = logging.WARNING if is_news else logging.DEBUG
        logger.log(level, "watcher.stale prefix=%s reason=%s", self._prefix, error)
        if self._table.mark_stale(self._clock.wall_s() - self.unproved_s()):
            self._deliver(self._table.snapshot(), Delta())

    def _log_bad(self, bad: Sequence[RecordError]) -> None:
        """Log values that can't be read: each key now and then only, and few of many."""
        for each in bad:
            self._count("bad_value")
            if self._log_once.should(each.key, BAD_AGAIN_S) and self._bad_lines.may_log():
                logger.warning("watcher.bad_value key=%s reason=%s", shortened(each.key, _KEY_CHARS), each.reason)
        if more := self._bad_lines.take_left_out():
            logger.warning("watcher.bad_values more=%d: omni doctor names them", more)

    def _log_refused(self, view: View) -> None:
        if view.refused_count and self._log_once.should("refused", BAD_AGAIN_S):
            text = "watcher.too_many_records prefix=%s read=%d refused=%d: find who writes them; omni doctor says more"
            logger.error(text, self._prefix, len(view.replicas), view.refused_count)
        if view.refused_hubs and self._log_once.should("refused hubs", BAD_AGAIN_S):
            text = "watcher.too_many_hubs prefix=%s read=%d refused=%d: find who writes them; omni doctor says more"
            logger.error(text, self._prefix, len(view.hubs), view.refused_hubs)

    def _deliver(self, view: View, delta: Delta) -> None:
        self._log_bad(delta.bad)
        delta = replace(delta, since_revision=self._delivered_revision)
        # Also if the listener fails: the next delta leads from this view on, which the listener has missed then.
        self._delivered_revision = view.revision
        try:
            self._on_view(view, delta)
        except Exception:
            logger.exception("watcher.listener_failed prefix=%s", self._prefix)
