"""AntiEntropy: runs beside a watch to prove the view fresh by beats, and to repair what the watch missed."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from omni_discovery.backoff import Backoff, wait_for_event
from omni_discovery.clock import Clock
from omni_discovery.errors import CompactedError, RegistryError, RegistryUnavailableError
from omni_discovery.kv import KVStore, PutEvent, WatchBatch
from omni_discovery.records.beat import Beat
from omni_discovery.records.schema import ReplicaStatus
from omni_discovery.view.freshness import LONGEST_ECHO_S, Distrust, Freshness, WriteBeat
from omni_discovery.view.long_lists import reconcile
from omni_discovery.view.table import Delta, ReplicaTable, shows_other_keys

logger = logging.getLogger(__name__)

#: For so long beats are repeated for a replica that waits for its drain to be applied.
_ASKED_S: Final = 5.0
#: Servers have lost a deletion when a watch was opened at the revision of a compaction; a second list finds it.
_SECOND_LOOK_S: Final = 1.0


class NotProvedError(RegistryUnavailableError):
    """The watch is open, but its view could not be proved fresh in time."""


def _ignore(_event: str | float) -> None:
    return None


@dataclass(frozen=True, slots=True)
class AntiEntropyOptions:
    """How a view is kept. ``beat`` None: freshness is not proved, as in a command that only displays the view."""

    beat: Callable[[KVStore], Beat] | None = None
    #: How long a beat may take from its write to the watch.
    echo_timeout_s: float = LONGEST_ECHO_S
    #: How often the view is compared with the registry.
    anti_entropy_s: float = 60.0
    #: The revision that the owner of the view has applied; None: that of the view.
    applied_revision: Callable[[], int] | None = None
    #: Counts, by name: ``relist``, ``bad_value``, ``repair``, ``unproved``.
    count: Callable[[str], None] = _ignore
    #: Gets the seconds from the write of each beat to its return on the watch.
    observe_echo: Callable[[float], None] = _ignore


class AntiEntropy:
    """Works on one table beside the watch that feeds it; belongs to that watch's event loop."""

    def __init__(
        self,
        kv: KVStore,
        table: ReplicaTable,
        prefix: str,
        deliver: Callable[[Delta], None],
        clock: Clock,
        options: AntiEntropyOptions,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._kv = kv
        self._table = table
        self._prefix = prefix
        self._deliver = deliver
        self._clock = clock
        self._options = options
        self._jitter = jitter
        self._beat = options.beat(kv) if options.beat is not None else None
        self._freshness = Freshness(options.echo_timeout_s)
        self._beat_trouble = Backoff(1.0, 1.0, jitter)
        #: The revision that a draining replica waits to see applied, and since when, monotonic.
        self._awaited_revision = (0, float("-inf"))
        self._wake = asyncio.Event()
        self._list_lock = asyncio.Lock()

    def watch_opened(self, listed_at_s: float) -> None:
        """A watch begins after a list that was requested at ``listed_at_s``, monotonic."""
        self._freshness.watch_opened(listed_at_s, self._clock.monotonic_s())

    @property
    def is_proving(self) -> bool:
        """Whether beats prove the view fresh. Without them an open watch is taken to be fresh until it ends."""
        return self._beat is not None

    @property
    def fresh_at_s(self) -> float:
        """The moment of the last proof, monotonic seconds; minus infinity before the first list."""
        return self._freshness.fresh_at_s

    @property
    def stale_at_s(self) -> float:
        """The moment, monotonic seconds, from which the view is stale unless another proof comes before."""
        return self.fresh_at_s + self._freshness.longest_unproved_s(self._count_hubs())

    def batch_applied(self, batch: WatchBatch, delta: Delta) -> None:
        """A batch of the watch has been applied, with the effect ``delta``."""
        if self._beat is None:
            return
        for event in batch.events:
            if not isinstance(event, PutEvent) or event.item.key != self._beat.key:
                continue
            if self._beat.is_echo(event.item.value):
                took_s = self._freshness.beat_echoed(self._clock.monotonic_s())
                if took_s is not None:
                    self._options.observe_echo(took_s)
                self._wake.set()
        if delta:
            self._freshness.news_arrived(self._clock.monotonic_s())
        if any(info.status is ReplicaStatus.DRAINING for info in delta.updated):
            # The replica waits until every hub's beat is of this revision.
            self._awaited_revision = self._revision(), self._clock.monotonic_s()
            self.request_beat()

    def request_beat(self) -> None:
        """Write a beat as soon as the rate allows, also while the watch brings changes."""
        self._freshness.request_beat()
        self._wake.set()

    async def prove_freshness(self) -> None:
        """Write beats while the watch is quiet. Ends only by NotProvedError, CompactedError or a cancellation."""
        # A write that hangs must not delay the end of trust, so each beat is written by a task of its own.
        writing: asyncio.Task[None] | None = None
        try:
            while True:
                hubs = self._count_hubs()
                delay_s = None if self._beat is None else self._freshness.due_s(hubs) - self._clock.monotonic_s()
                await wait_for_event(self._wake, self._clock, delay_s)
                self._wake.clear()
                if writing is not None and writing.done():
                    writing.result()
                    writing = None
                match self._freshness.tick(self._clock.monotonic_s(), hubs):
                    case WriteBeat(counter):
                        if writing is not None:
                            # Its beat came back on the watch, though the call has not ended yet.
                            writing.cancel()
                        writing = asyncio.create_task(self._write(counter))
                        writing.add_done_callback(lambda _: self._wake.set())
                    case Distrust():
                        self._options.count("unproved")
                        # The next watch would be of the same member, which answers but may be behind.
                        self._kv.move_on()
                        raise NotProvedError(f"a beat did not come back within {self._options.echo_timeout_s:g} s")
                    case None:
                        continue
        finally:
            if writing is not None:
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)

    async def compare_with_registry(self) -> None:
        """List again a second after the watch began, then compare periodically. Ends only by CompactedError."""
        backoff = Backoff(1.0, 30.0, self._jitter)
        delay_s, second_look = _SECOND_LOOK_S, True
        while True:
            await self._clock.sleep(delay_s)
            try:
                if second_look or await self._differs():
                    await self._reconcile()
                second_look = False
                backoff.reset()
                # Jitter: not all hubs of a cluster at once.
                delay_s = self._options.anti_entropy_s * (0.9 + 0.2 * self._jitter())
            except CompactedError:
                raise
            except RegistryError as error:
                logger.log(backoff.log_level(error), "watcher.not_compared prefix=%s reason=%s", self._prefix, error)
                delay_s = backoff.next_delay_s()

    async def _write(self, counter: int) -> None:
        assert self._beat is not None  # noqa: S101 - no beat is due without one
        revision = (self._options.applied_revision or self._revision)()
        asked_revision, asked_at_s = self._awaited_revision
        if revision < asked_revision and self._clock.monotonic_s() < asked_at_s + _ASKED_S:
            # The owner has not applied the awaited revision yet: another beat must follow.
            self._freshness.request_beat()
        try:
            await self._beat.write(counter, revision, self._clock.wall_s())
            self._beat_trouble.reset()
        except RegistryError as error:
            # An etcd that accepts no writes may still be read: then a list is the proof.
            began_s = self._clock.monotonic_s()
            level = self._beat_trouble.log_level(error)
            logger.log(level, "watcher.no_beat prefix=%s reason=%s", self._prefix, error)
            await self._prove_by_list()
            self._freshness.beat_refused(began_s, self._clock.monotonic_s())

    async def _prove_by_list(self) -> None:
        try:
            await self._reconcile()
        except CompactedError:
            raise
        except RegistryError as error:
            raise NotProvedError(str(error)) from error

    def _count_hubs(self) -> int:
        return max(1, len(self._table.snapshot().hubs))

    def _revision(self) -> int:
        return self._table.snapshot().revision

    async def _differs(self) -> bool:
        return await self._kv.summary(self._prefix) != self._table.summary()

    async def _reconcile(self) -> None:
        """List, and apply what the watch has missed. Raise CompactedError if the registry went back in its history."""
        async with self._list_lock:
            before = self._table.snapshot()
            self._table.begin_reconcile()
            listing = await self._kv.list(self._prefix)
            if listing.cluster_id != before.cluster_id or listing.revision < before.revision:
                raise CompactedError(f"the registry is another one, or went back to revision {listing.revision}")
            delta, missed = await reconcile(self._table, listing, self._clock.wall_s)
        if missed:
            self._options.count("repair")
            logger.warning("watcher.repaired prefix=%s keys=%d revision=%d", self._prefix, missed, listing.revision)
        after = self._table.snapshot()
        if delta or shows_other_keys(before, after):
            self._deliver(delta)
