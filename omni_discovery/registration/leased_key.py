"""Keeps one leased key registered: claims it, renews it, rewrites it, puts it back, withdraws it.

``LeasedKey`` does all that for any key; what the key is and what stands in it, its subclasses in registrations.py say.

The write budget: all replicas of a namespace together publish their load at most so often.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

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
#: Counts made per second, by all of them together; and the shortest pause between two of one replica.
_COUNTS_PER_S: Final = 20.0
_LEAST_PAUSE_S: Final = 10.0


class LoadPace:
    """When one replica may write its load. ``base_s`` is the shortest interval, however few replicas there are."""

    def __init__(self, base_s: float, writes_per_s: float = WRITES_PER_S) -> None:
        self._base_s = base_s
        self._writes_per_s = writes_per_s
        #: Seconds from one write to the next.
        self.interval_s = base_s

    def set_replica_count(self, replicas: int) -> None:
        """So many replicas share the budget."""
        self.interval_s = max(self._base_s, replicas / self._writes_per_s)

    def next_write_s(self, written_at_s: float, now_s: float, chance: float) -> float:
        """When a change of ``now_s`` may be written; ``chance`` is a number from 0 to 1, drawn once for the change."""
        moment_s = written_at_s + self.interval_s
        if self.interval_s == self._base_s:
            return moment_s
        # A burst may hit a thousand replicas that were all silent for long.
        return max(moment_s, now_s + chance * self.interval_s)


async def watch_population(
    kv: KVStore, prefix: str, pace: LoadPace, clock: Clock, jitter: Callable[[], float] = random.random
) -> None:
    """Count the replicas under ``prefix`` every so often and tell ``pace``. Ends only by cancellation."""
    replicas = 0
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
    """Who is told, on the registrar's loop. What these functions raise is logged and changes nothing.

    ``on_registered(key)`` comes once the key is ours, before the record names its epoch; ``on_published(key)`` after
    each write that was acknowledged; ``on_lost(reason)`` when the key is no longer ours, and it will be put back;
    ``on_lease_change(state)`` at each change of the lease, before a loss of it is reported by ``on_lost``.
    """

    on_registered: Callable[[KeyValue], None] = _ignore
    on_published: Callable[[KeyValue], None] = _ignore
    on_lost: Callable[[str], None] = _ignore
    on_lease_change: Callable[[LeaseState], None] = _ignore


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
        #: Grows while others keep writing our key, so that two owners of one key don't chase each other.
        self._repair_backoff = Backoff(0.05, 30.0, jitter)
        #: The key as we last knew it to be ours; None while it has to be claimed.
        self._standing: KeyValue | None = None
        #: Watches the key that stands; cancelled when that is lost.
        self._own_key_watch: asyncio.Task[None] | None = None
        #: Our latest writes, to tell our own from another's when they come back.
        self._sent_values: deque[bytes] = deque(maxlen=4)
        self._wake = asyncio.Event()
        #: When the next rewrite may go out; None while there is nothing new to say.
        self._publish_at_s: float | None = None
        self._published_at_s = float("-inf")
        self._repaired_at_s = float("-inf")
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    @abc.abstractmethod
    async def _claim(self, lease_id: int) -> KeyValue:
        """Make a key ours under the lease; return it as it stands. Raise RegistryError."""

    @abc.abstractmethod
    def _value(self, key: KeyValue) -> bytes:
        """What should stand in the key now."""

    @abc.abstractmethod
    def _set_farewell(self) -> bool:
        """Change what should stand in the key to a farewell; say whether there is one."""

    def start(self) -> None:
        """Begin to register; returns at once."""
        self._tasks = (
            asyncio.create_task(self._keeper.run(), name="lease-keeper"),
            asyncio.create_task(self._work(), name="registrar"),
        )

    async def close(self, timeout_s: float = 3.0) -> None:
        """Say farewell, wait until that is acknowledged, end the lease; all within ``timeout_s``. Idempotent."""
        tasks, self._tasks = self._tasks, ()
        if not tasks:
            return
        if self._own_key_watch is not None:
            tasks = (*tasks, self._own_key_watch)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(timeout_s):
                await self._withdraw()
        except (TimeoutError, RegistryError) as error:
            logger.warning("registrar.left_to_expire key=%s reason=%r", self._key_name, error)
        self._standing = None

    @property
    def lease_id(self) -> int:
        """The lease that the key is under; 0 while there is none."""
        return self._keeper.lease_id

    def story_lines(self) -> list[str]:
        """What happened to the lease, oldest first, each line with its time."""
        return self._keeper.story_lines()

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The key, or its prefix while it has no number: what an operator knows it by."""

    @property
    def _key_name(self) -> str:
        return self._standing.key if self._standing else "-"

    def _schedule_publish(self, *, at_once: bool) -> None:
        """What should stand in the key has changed."""
        moment_s = self._clock.monotonic_s()
        if not at_once:
            moment_s = self._load_pace.next_write_s(self._published_at_s, moment_s, self._jitter())
        # A load that waits already does not draw lots again with each change.
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
        """Do what is due under the lease: claim, then publish."""
        if not lease_id:
            return
        if self._standing is None or self._standing.lease_id != lease_id:
            self._standing = await self._claim(lease_id)
            self._watch_own_key(self._standing)
            self._schedule_publish(at_once=True)
            logger.info("registrar.registered key=%s epoch=%d", self._standing.key, self._standing.create_revision)
            self._notify(self._listener.on_registered, self._standing)
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
                # Read after what we knew of: the registry was restored from a backup, and its word counts.
                self._standing = replace(standing, mod_revision=0)
            self._observe(claim.current)
        elif claim.current is not None and self._standing is not None:
            self._standing = claim.current
            self._notify(self._listener.on_published, claim.current)

    def _watch_own_key(self, life: KeyValue) -> None:
        """Watch our key until this life of it ends, whatever the keep-alive says: servers have answered renewals of
        leases they had ended.
        """
        watching = list_and_watch(self._kv, life.key, self, is_prefix=False, clock=self._clock, jitter=self._jitter)
        self._own_key_watch = asyncio.create_task(watching, name="own-key-watch")

    async def replace(self, listing: Listing, asked_at_s: float) -> None:
        """See WatchSink: our own key was read."""
        self._observe(listing.items[0] if listing.items else None)

    async def apply(self, batch: WatchBatch) -> None:
        """See WatchSink: our own key was written or deleted, by us or by another."""
        for event in batch.events:
            current = event.item if isinstance(event, PutEvent) else None
            revision = event.item.mod_revision if isinstance(event, PutEvent) else event.mod_revision
            # What is older than the last answer to a write of ours is of a former life, or known.
            if self._standing is not None and revision > self._standing.mod_revision:
                self._observe(current)

    def on_watch_failed(self, error: Exception, log_level: int) -> None:
        """See WatchSink."""
        if isinstance(error, CompactedError):
            return
        if isinstance(error, RegistryError):
            logger.log(log_level, "registrar.guard_retrying key=%s reason=%s", self._key_name, error)
        else:
            logger.error("registrar.guard_failed key=%s", self._key_name, exc_info=error)

    def _observe(self, current: KeyValue | None) -> None:
        """So our key stands in the registry now."""
        standing = self._standing
        if standing is None:
            return
        if current is None:
            self._lose("the key was deleted")
        elif current.create_revision != standing.create_revision:
            self._lose("the key belongs to another now")
        elif current.mod_revision <= standing.mod_revision:
            return
        elif current.lease_id == standing.lease_id and current.value in self._sent_values:
            self._standing = current
        else:
            self._repair(standing, current)

    def _repair(self, standing: KeyValue, current: KeyValue) -> None:
        """Someone wrote over our record, and perhaps took it off our lease: write it again, ever slower."""
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
        if self._standing is not None and self._set_farewell():
            retrying = tenacity.AsyncRetrying(
                retry=tenacity.retry_if_exception_type(RegistryUnavailableError),
                wait=tenacity.wait_random_exponential(multiplier=0.05, max=0.5),
                sleep=self._clock.sleep,
            )
            await retrying(self._publish_farewell)
        await self._keeper.revoke()

    async def _publish_farewell(self) -> None:
        # A write of ours that was under way when we stopped may have moved the key: then once more.
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
