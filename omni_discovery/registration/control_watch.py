"""ControlWatch: watches the control key of one replica, binds drains to its life, and deletes a drain that is done.

A key that the registry has lost, because it was wiped or restored from an older copy, is put back: only an operator
takes back what an operator has said.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import replace as changed
from typing import Final

from omni_discovery.clock import Clock, SystemClock
from omni_discovery.errors import CompactedError, RegistryDeniedError, RegistryError, RegistryRefusedError
from omni_discovery.kv import KeyValue, KVStore, Listing, PutEvent, WatchBatch
from omni_discovery.list_watch import list_and_watch
from omni_discovery.records import keys
from omni_discovery.records.control import AppliedControl, Decision, decide, without_drain

logger = logging.getLogger(__name__)

#: Attempts to bind a drain in a value that others keep changing; then the watch brings the newest value.
_BIND_TRIES: Final = 3
#: The error in the record where the key can't be put back.
_LOST: Final = (
    "the registry has lost the control key and refuses to have it put back; what it said holds until it is written"
    ' again, for example {"cordon": false}'
)
#: The error in the record where a drain by hand can't be bound.
_UNBOUND: Final = (
    "a drain without an epoch has to be bound to this life, and this replica's user of etcd may not write the key: "
    "use 'omni drain', or write the epoch too"
)


class ControlWatch:
    """Watches one replica's control key; ``on_change(applied)`` is called on its loop when what applies changes."""

    def __init__(
        self,
        kv: KVStore,
        namespace: str,
        stage_id: int,
        on_change: Callable[[AppliedControl], None],
        *,
        clock: Clock | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._kv = kv
        self._namespace = namespace
        self._stage_id = stage_id
        self._on_change = on_change
        self._clock = clock or SystemClock()
        self._jitter = jitter
        self._task: asyncio.Task[None] | None = None
        self._replica_id = -1
        self._key = ""
        self._epoch = 0
        self._applied = AppliedControl()
        #: Whether the key of this id was read, or can't be. Until then the replica may be cordoned without knowing.
        self.known = False
        #: The key with the drain that this process obeys; None without one.
        self._drain: KeyValue | None = None
        self._seen_revision = 0
        #: The registry's cluster id, and its latest revision that was seen; None before the first list.
        self._history: tuple[int, int] | None = None
        #: The key as it was seen last; None if there was none.
        self._standing: KeyValue | None = None
        #: The key that the registry has lost, until it is put back or an operator has written it again.
        self._lost: KeyValue | None = None
        #: The key that was put back last. With another id it goes with this process.
        self._put_back: KeyValue | None = None

    def watch_control(self, replica_id: int, epoch: int, listing: Listing | None = None) -> None:
        """Watch the key of this id, for the life ``epoch``. What applied to another id ends, but for a drain.

        ``listing`` is the key as it was read just now, if it was: unless something has to be written first, it is
        applied before this returns. With a registry that has lost its keys an id means nothing: then all that applied
        goes with this process.
        """
        if replica_id != self._replica_id:
            self._lost = self._lost or self._put_back
            if self._lost is None:
                self.known = False
                self._applied = AppliedControl(draining=self._applied.draining)
                self._standing = None
        self._replica_id, self._epoch, self._seen_revision = replica_id, epoch, 0
        if self._task is not None:
            self._task.cancel()
        self._key = keys.replica_control_key(self._namespace, self._stage_id, replica_id)
        if listing is not None:
            self._apply_now(listing)
        watching = list_and_watch(
            self._kv, self._key, self, is_prefix=False, clock=self._clock, jitter=self._jitter, first=listing
        )
        self._task = asyncio.create_task(watching, name="control-watch")

    @property
    def has_drain(self) -> bool:
        """Whether the key has the drain that this process obeys, which ``close`` removes."""
        return self._drain is not None

    async def close(self, timeout_s: float) -> None:
        """Stop watching; remove the drain of this life from the key, if that works within ``timeout_s``. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        drain, self._drain = self._drain, None
        if drain is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._take_back(drain)
        except RegistryDeniedError:
            logger.info("control.drain_left key=%s: this user of etcd may not write it; 'omni drain' does", drain.key)
        except (TimeoutError, RegistryError) as error:
            logger.warning("control.drain_left key=%s reason=%r", drain.key, error)

    @property
    def _name(self) -> str:
        return f"{self._stage_id}/{self._replica_id}"

    async def _take_back(self, drain: KeyValue) -> None:
        left = without_drain(drain.value)
        if left is None:
            done = await self._kv.delete(drain.key, drain.mod_revision)
        else:
            done = (await self._kv.compare_and_put(drain.key, left, drain.mod_revision)).won
        logger.info("control.drained key=%s removed=%s", drain.key, done)

    async def replace(self, listing: Listing, asked_at_s: float) -> None:
        """See WatchSink."""
        self._seen_revision = 0
        current = listing.items[0] if listing.items else None
        if self._has_lost_keys(listing, current):
            self._lost = self._standing
        self._history = (listing.cluster_id, listing.revision)
        if self._lost is not None:
            current = await self._restore(self._lost, current)
        await self._observe(current, listing.revision)

    async def apply(self, batch: WatchBatch) -> None:
        """See WatchSink."""
        if self._history is not None:
            self._history = (self._history[0], max(self._history[1], batch.revision))
        for event in batch.events:
            current = event.item if isinstance(event, PutEvent) else None
            revision = event.item.mod_revision if isinstance(event, PutEvent) else event.mod_revision
            if revision > self._seen_revision:
                self._lost = self._put_back = None
                await self._observe(current, revision)

    def on_watch_failed(self, error: Exception, log_level: int) -> None:
        """See WatchSink."""
        match error:
            case CompactedError():
                logger.info("control.relist replica=%s", self._name)
            case RegistryRefusedError():
                level = logging.ERROR if log_level >= logging.WARNING else log_level
                logger.log(level, "control.refused key=%s reason=%s", self._key, error)
                # That nobody may read the key takes nothing back.
                self._apply(changed(self._applied, error=f"can't be read: {error}"[:1000]))
            case RegistryError():
                logger.log(log_level, "control.retrying key=%s reason=%s", self._key, error)
            case _:
                logger.error("control.failed replica=%s", self._name, exc_info=error)

    def _apply_now(self, listing: Listing) -> None:
        """Apply the key without a write, if that can be; else ``replace``, which gets the listing too, does it all."""
        current = listing.items[0] if listing.items else None
        if self._lost is None and not self._has_lost_keys(listing, current):
            self._decide(current, listing.revision)

    async def _observe(self, current: KeyValue | None, revision: int) -> None:
        """The key had the value ``current`` at ``revision``: bind a drain in it if there is one, then apply it."""
        if current is None and self._lost is not None:
            self._apply(changed(self._applied, revision=0, error=_LOST))
            return
        for _ in range(_BIND_TRIES):
            decision = self._decide(current, revision)
            if decision.bound is None or current is None:
                return
            try:
                claim = await self._kv.compare_and_put(self._key, decision.bound, current.mod_revision)
            except RegistryDeniedError:
                # Unbound, it would drain every life that comes after this one, too.
                self._apply(changed(decision.applied, error=f"revision {current.mod_revision}: {_UNBOUND}"))
                return
            current, revision = claim.current, claim.revision

    def _decide(self, current: KeyValue | None, revision: int) -> Decision:
        """Note what the key has at ``revision``; decide what it means, and apply that unless a drain must be bound."""
        self._standing = current
        self._seen_revision = current.mod_revision if current is not None else revision
        decision = decide(current, self._epoch, self._applied)
        if decision.bound is None:
            if decision.applied.draining and (self._drain is None or self._drain.key == self._key):
                self._drain = current
            self._apply(decision.applied)
        return decision

    def _has_lost_keys(self, listing: Listing, current: KeyValue | None) -> bool:
        """Whether the registry is another one than before, or went back in its history.

        By the time of the list a restored registry may have more writes behind it than there were before: a key whose
        own revision is an earlier one tells it all the same.
        """
        if self._history is None:
            return False
        standing = self._standing
        is_older = current is not None and standing is not None and current.mod_revision < standing.mod_revision
        return listing.cluster_id != self._history[0] or listing.revision < self._history[1] or is_older

    async def _restore(self, lost: KeyValue, current: KeyValue | None) -> KeyValue | None:
        """Write a key that the registry has lost again; return the key as it is then. A drain is not written again.

        One that somebody else has written meanwhile stays; ``current`` is only an older copy if it is the same key at
        an earlier revision.
        """
        value = without_drain(lost.value)
        is_older = current is not None and current.create_revision == lost.create_revision
        is_older = is_older and current is not None and current.mod_revision < lost.mod_revision
        mine = None
        if value is not None and (current is None or is_older):
            try:
                if current is None:
                    claim = await self._kv.create(self._key, value)
                else:
                    claim = await self._kv.compare_and_put(self._key, value, current.mod_revision)
            except RegistryRefusedError as error:
                logger.error("control.not_put_back key=%s reason=%s: what it said goes on to hold", self._key, error)
                return current
            current = claim.current
            if claim.won:
                mine = current
                logger.warning("control.put_back key=%s: the registry has lost it", self._key)
        if self._put_back is not None and self._put_back.key != self._key:
            # It was put back under the id that this process had before, and would steer whoever has that now.
            await self._kv.delete(self._put_back.key, self._put_back.mod_revision)
        self._lost, self._put_back = None, mine
        return current

    def _apply(self, applied: AppliedControl) -> None:
        before, self._applied = self._applied, applied
        if applied == before and self.known:
            return
        self.known = True
        if applied != before:
            logger.info(
                "control.applied replica=%s cordoned=%s weight=%s draining=%s revision=%d error=%r",
                self._name,
                applied.cordoned,
                applied.weight,
                applied.draining,
                applied.revision,
                applied.error,
            )
        try:
            self._on_change(applied)
        except Exception:
            logger.exception("control.listener_failed replica=%s", self._name)
