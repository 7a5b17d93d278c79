"""LeasedKey: keeps one key registered under a lease: claims, renews, rewrites, restores and withdraws it.

The key and its value are defined by the subclasses in registrars.py. ``LoadPace`` keeps the write budget: all replicas
of a namespace together publish their load at a bounded rate.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import os
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import tenacity

from omni_discovery.backoff import Backoff, wait_for_event
from omni_discovery.clock import Clock, SystemClock
from omni_discovery.errors import CompactedError, LeaseNotFoundError, RegistryError, RegistryUnavailableError
from omni_discovery.kv import KeyValue, KVStore, Listing, PutEvent, WatchBatch
from omni_discovery.list_watch import list_and_watch
from omni_discovery.registration.lease import LeaseState
from omni_discovery.registration.lease_keeper import LeaseKeeper

logger = logging.getLogger(__name__)

#: Loads written per second, by all replicas of a namespace together.
WRITES_PER_S: Final = 200.0
#: Counts of replicas per second, by all replicas together; and the shortest pause between two counts of one replica.
_COUNTS_PER_S: Final = 20.0
_LEAST_PAUSE_S: Final = 10.0
#: The first count is made after about so long: etcd reads all records for one, which would hold a registration up.
_FIRST_COUNT_S: Final = 1.0


class LoadPace:
    """When one replica may write its load. ``base_s`` is the shortest interval in seconds, for few replicas."""

    def __init__(self, base_s: float, writes_per_s: float = WRITES_PER_S) -> None:
        self._base_s = base_s
        self._writes_per_s = writes_per_s
        #: Seconds from one write to the next.
        self.interval_s = base_s

    def set_replica_count(self, replicas: int) -> None:
        """``replicas`` replicas share the write budget."""
        self.interval_s = max(self._base_s, replicas / self._writes_per_s)

    def next_write_s(self, written_at_s: float, now_s: float, chance: float) -> float:
        """When a change made at ``now_s`` may be written; ``chance`` is a random number from 0 to 1."""
        moment_s = written_at_s + self.interval_s
        if self.interval_s == self._base_s:
            return moment_s
        # Spread over the interval: a burst may change the load of a thousand idle replicas at once.
        return max(moment_s, now_s + chance * self.interval_s)


async def watch_population(
    kv: KVStore, prefix: str, pace: LoadPace, clock: Clock, jitter: Callable[[], float] = random.random
) -> None:
    """Count the replicas under ``prefix`` periodically, for ``pace``. Ends only by cancellation."""
    replicas = 0
    await clock.sleep(_FIRST_COUNT_S * (0.5 + jitter()))
    while True:
        try:
            replicas = (await kv.summary(prefix)).count
            pace.set_replica_count(replicas)
        except RegistryError as error:
            logger.debug("write_budget.not_counted reason=%s", error)
        except Exception:
            logger.exception("write_budget.failed")
        pause_s = max(_LEAST_PAUSE_S, replicas / _COUNTS_PER_S)
        await clock.sleep(pause_s * (0.5 + jitter()))


def _ignore(*arguments: object) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Listener:
    """Callbacks, called on the registrar's loop. An exception from one is logged and changes nothing.

    ``on_registered(key)``: the key was claimed; its record has no epoch yet. ``on_published(key)``: a write of the
    record was acknowledged. ``on_lost(reason)``: the key was lost, and will be claimed again.
    ``on_lease_change(state)``: the lease changed its state; a loss of it is reported here first, then by ``on_lost``.
    """

    on_registered: Callable[[KeyValue], None] = _ignore
    on_published: Callable[[KeyValue], None] = _ignore
    on_lost: Callable[[str], None] = _ignore
    on_lease_change: Callable[[LeaseState], None] = _ignore


class _OwnKeySink:
    """WatchSink for one life of a leased key: from its claim to its deletion, by key and create_revision.

    ``standing`` returns the claimed key as last known, None while none is claimed. Once that is not of this life any
    more, lists, events and errors are ignored: the key may belong to another replica by then. Until then ``observe``
    is called with the key as it is in the registry, None if it was deleted.
    """

    def __init__(
        self, life: KeyValue, standing: Callable[[], KeyValue | None], observe: Callable[[KeyValue | None], None]
    ) -> None:
        self._life = life
        self._standing = standing
        self._observe = observe

    async def replace(self, listing: Listing, asked_at_s: float) -> None:
        """See WatchSink: the key was read."""
        if self._standing_in_life() is not None:
            self._observe(listing.items[0] if listing.items else None)

    async def apply(self, batch: WatchBatch) -> None:
        """See WatchSink: the key was written or deleted, by this process or another."""
        for event in batch.events:
            current = event.item if isinstance(event, PutEvent) else None
            revision = event.item.mod_revision if isinstance(event, PutEvent) else event.mod_revision
            standing = self._standing_in_life()
            # Events older than the last acknowledged write are known already.
            if standing is not None and revision > standing.mod_revision:
                self._observe(current)

    def on_watch_failed(self, error: Exception, log_level: int) -> None:
        """See WatchSink."""
        if self._standing_in_life() is None or isinstance(error, CompactedError):
            return
        if isinstance(error, RegistryError):
            logger.log(log_level, "registrar.guard_retrying key=%s reason=%s", self._life.key, error)
        else:
            logger.error("registrar.guard_failed key=%s", self._life.key, exc_info=error)

    def _standing_in_life(self) -> KeyValue | None:
        """The claimed key as last known; None if this life of it is over."""
        standing = self._standing()
        if standing is None:
            return None
        is_same = (standing.key, standing.create_revision) == (self._life.key, self._life.create_revision)
        return standing if is_same else None


class LeasedKey(abc.ABC):
    """One key under one lease. All methods belong to one event loop."""

    def __init__(
        self,
        kv: KVStore,
        *,
        ttl_s: float = 10.0,
        load_interval_s: float = 0.5,
        clock: Clock | None = None,
        may_renew: Callable[[], bool] = lambda: True,
        listener: Listener | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._kv = kv
        self._clock = clock or SystemClock()
        self._listener = listener or Listener()
        self._jitter = jitter
        self._load_pace = LoadPace(load_interval_s)
        self._keeper = LeaseKeeper(
            kv, ttl_s, clock=self._clock, may_renew=may_renew, on_change=self._on_lease_change, jitter=jitter
        )
        self._backoff = Backoff(0.05, 2.0, jitter)
        #: Grows while others keep writing the key, so that two owners of one key don't overwrite each other in a loop.
        self._repair_backoff = Backoff(0.05, 30.0, jitter)
        #: The key as last acknowledged or watched; None while it has to be claimed.
        self._standing: KeyValue | None = None
        #: Watches the claimed key; cancelled when the key is lost or claimed again.
        self._own_key_watch: asyncio.Task[None] | None = None
        #: The values written last, to recognise them on the watch.
        self._sent_values: deque[bytes] = deque(maxlen=4)
        self._wake = asyncio.Event()
        #: When the next write is due; None while the record is up to date.
        self._publish_at_s: float | None = None
        self._published_at_s = float("-inf")
        self._repaired_at_s = float("-inf")
        self._tasks: tuple[asyncio.Task[Any], ...] = ()

    @abc.abstractmethod
    async def _claim(self, lease_id: int) -> KeyValue:
        """Claim a key under the lease; return it as written. Raise RegistryError."""

    @abc.abstractmethod
    def _value(self, key: KeyValue) -> bytes:
        """The value that the key should have now."""

    @abc.abstractmethod
    def _set_withdrawn(self) -> bool:
        """Change the value to one that announces the withdrawal; return False if there is none."""

    @property
    def lease_left_s(self) -> float:
        """How long the key's lease lasts if it is not renewed; 0 without one. May be read from any thread."""
        return self._keeper.left_s

    def start(self) -> None:
        """Begin to register; return at once."""
        self._tasks = (
            asyncio.create_task(self._keeper.run(), name="lease-keeper"),
            asyncio.create_task(self._work(), name="registrar"),
        )

    async def close(self, timeout_s: float = 3.0) -> None:
        """Publish the withdrawal and wait for it, then revoke the lease; all within ``timeout_s``. Idempotent."""
        tasks, self._tasks = self._tasks, ()
        if not tasks:
            return
        watches = () if self._own_key_watch is None else (self._own_key_watch,)
        for task in (*tasks, *watches):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(timeout_s):
                await self._withdraw()
        except (TimeoutError, RegistryError) as error:
            logger.warning("registrar.left_to_expire key=%s reason=%r", self._key_name, error)
        # A stream takes its time to end, which the withdrawal need not wait for.
        await asyncio.gather(*watches, return_exceptions=True)
        self._standing = None

    @property
    def lease_id(self) -> int:
        """The lease of the key; 0 while none is granted."""
        return self._keeper.lease_id

    def story_lines(self) -> list[str]:
        """The events of the lease, oldest first, each line with its time."""
        return self._keeper.story_lines()

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The key; its prefix while it has no id yet."""

    @property
    def _key_name(self) -> str:
        return self._standing.key if self._standing else "-"

    def _schedule_publish(self, *, at_once: bool) -> None:
        """The value has changed: write it at once, or when the write budget allows."""
        moment_s = self._clock.monotonic_s()
        if not at_once:
            moment_s = self._load_pace.next_write_s(self._published_at_s, moment_s, self._jitter())
        # A write that is due already keeps its time: further changes don't delay it.
        if self._publish_at_s is None or (at_once and moment_s < self._publish_at_s):
            self._publish_at_s = moment_s
            self._wake.set()

    async def _work(self) -> None:
        while True:
            await wait_for_event(self._wake, self._clock, self._delay_s())
            self._wake.clear()
            lease_id = self._keeper.lease_id
            try:
                await self._step(lease_id)
                self._backoff.reset()
                continue
            except LeaseNotFoundError:
                self._keeper.forget_lease(lease_id)
            except RegistryError as error:
                level = self._backoff.log_level(error)
                logger.log(level, "registrar.retrying key=%s reason=%s", self._key_name, error)
            except Exception:
                logger.exception("registrar.failed key=%s", self._key_name)
            await self._clock.sleep(self._backoff.next_delay_s())
            self._wake.set()

    def _delay_s(self) -> float | None:
        if self._publish_at_s is None or not self._keeper.lease_id:
            return None
        return self._publish_at_s - self._clock.monotonic_s()

    async def _step(self, lease_id: int) -> None:
        """Claim the key if it is not claimed, then publish if that is due. Raise RegistryError."""
        if not lease_id:
            return
        if self._standing is None or self._standing.lease_id != lease_id:
            claimed = await self._claim(lease_id)
            if self._keeper.lease_id != lease_id:
                # The lease was lost meanwhile, and the key with it: the next step claims under the next lease.
                return
            self._standing = claimed
            self._watch_own_key(claimed)
            self._schedule_publish(at_once=True)
            # The listener first: from then on, the lines of a replica's process have its name.
            self._notify(self._listener.on_registered, claimed)
            text = "registrar.registered key=%s epoch=%d pid=%d"
            logger.info(text, claimed.key, claimed.create_revision, os.getpid())
        if self._publish_at_s is not None and self._clock.monotonic_s() >= self._publish_at_s:
            await self._publish(self._standing)

    async def _publish(self, standing: KeyValue) -> None:
        value = self._value(standing)
        self._sent_values.append(value)
        self._publish_at_s = None
        try:
            claim = await self._kv.compare_and_put(standing.key, value, standing.mod_revision, standing.lease_id)
        except RegistryError:
            self._schedule_publish(at_once=True)
            raise
        self._published_at_s = self._clock.monotonic_s()
        if not claim.won:
            self._schedule_publish(at_once=True)
            if self._standing and claim.current and claim.current.mod_revision < standing.mod_revision:
                # An older revision than the one known: the registry was restored from a backup. Accept what it has.
                self._standing = replace(standing, mod_revision=0)
            self._observe(claim.current)
        elif claim.current is not None and self._standing is not None:
            self._standing = claim.current
            self._notify(self._listener.on_published, claim.current)

    def _watch_own_key(self, life: KeyValue) -> None:
        """Watch the key until this life of it ends. Renewals are no proof: servers have renewed ended leases."""
        if self._own_key_watch is not None:
            self._own_key_watch.cancel()
        sink = _OwnKeySink(life, lambda: self._standing, self._observe)
        watching = list_and_watch(self._kv, life.key, sink, is_prefix=False, clock=self._clock, jitter=self._jitter)
        self._own_key_watch = asyncio.create_task(watching, name="own-key-watch")

    def _observe(self, current: KeyValue | None) -> None:
        """The key is ``current`` in the registry now, None if it does not exist."""
        standing = self._standing
        if standing is None:
            return
        if current is None:
            self._lose("the key was deleted")
        elif current.create_revision != standing.create_revision:
            self._lose("the key belongs to another now")
        elif current.mod_revision == standing.mod_revision:
            return
        elif current.mod_revision < standing.mod_revision:
            # The registry was restored from an older copy; or a list was answered just before the last write, and then
            # one write is superfluous.
            self._standing = replace(standing, mod_revision=current.mod_revision)
            self._schedule_publish(at_once=True)
        elif current.lease_id == standing.lease_id and current.value in self._sent_values:
            self._standing = current
        else:
            self._repair(standing, current)

    def _repair(self, standing: KeyValue, current: KeyValue) -> None:
        """Another process wrote over the record, perhaps off its lease: write it again, with growing pauses."""
        logger.warning("registrar.overwritten key=%s revision=%d", current.key, current.mod_revision)
        now_s = self._clock.monotonic_s()
        if now_s - self._repaired_at_s > 60.0:
            self._repair_backoff.reset()
        self._repaired_at_s = now_s
        self._standing = replace(standing, mod_revision=current.mod_revision)
        self._publish_at_s = now_s + self._repair_backoff.next_delay_s()
        self._wake.set()

    def _on_lease_change(self, state: LeaseState) -> None:
        self._notify(self._listener.on_lease_change, state)
        match state:
            case LeaseState.LOST:
                self._lose(self._keeper.reason)
            case LeaseState.HELD:
                self._wake.set()
            case LeaseState.SUSPECT | LeaseState.UNGRANTED:
                return

    def _lose(self, reason: str) -> None:
        if self._standing is not None:
            logger.warning("registrar.lost key=%s reason=%s", self._standing.key, reason)
            self._standing = None
            if self._own_key_watch is not None:
                self._own_key_watch.cancel()
            self._notify(self._listener.on_lost, reason)
        self._wake.set()

    async def _withdraw(self) -> None:
        if self._standing is not None and self._set_withdrawn():
            retrying = tenacity.AsyncRetrying(
                retry=tenacity.retry_if_exception_type(RegistryUnavailableError),
                wait=tenacity.wait_random_exponential(multiplier=0.05, max=0.5),
                sleep=self._clock.sleep,
            )
            await retrying(self._publish_withdrawal)
        await self._keeper.revoke()

    async def _publish_withdrawal(self) -> None:
        # A write under way at the close may have changed the key's revision: then try once more.
        for _ in range(2):
            if self._standing is not None:
                await self._publish(self._standing)
            if self._publish_at_s is None:
                return

    def _notify(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            function(*arguments)
        except Exception:
            logger.exception("registrar.listener_failed key=%s", self._key_name)
