"""ControlWatch: watches the control key of one replica, binds drains to its life, and deletes a drain that is done."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Final

from omni_discovery.clock import Clock, SystemClock
from omni_discovery.errors import CompactedError, RegistryError, RegistryRefusedError
from omni_discovery.kv import KeyValue, KVStore, Listing, PutEvent, WatchBatch
from omni_discovery.list_watch import list_and_watch
from omni_discovery.records import keys
from omni_discovery.records.control import AppliedControl, decide, without_drain

logger = logging.getLogger(__name__)

#: Attempts to bind a drain in a value that others keep changing; then the watch brings the newest value.
_BIND_TRIES: Final = 3


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

    def watch_control(self, replica_id: int, epoch: int) -> None:
        """Watch the key of this id, for the life ``epoch``. What applied to another id ends, but for a drain."""
        if replica_id != self._replica_id:
            self.known = False
            self._applied = AppliedControl(draining=self._applied.draining)
        self._replica_id, self._epoch, self._seen_revision = replica_id, epoch, 0
        if self._task is not None:
            self._task.cancel()
        self._key = keys.replica_control_key(self._namespace, self._stage_id, replica_id)
        watching = list_and_watch(self._kv, self._key, self, is_prefix=False, clock=self._clock, jitter=self._jitter)
        self._task = asyncio.create_task(watching, name="control-watch")

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
        await self._observe(listing.items[0] if listing.items else None, listing.revision)

    async def apply(self, batch: WatchBatch) -> None:
        """See WatchSink."""
        for event in batch.events:
            current = event.item if isinstance(event, PutEvent) else None
            revision = event.item.mod_revision if isinstance(event, PutEvent) else event.mod_revision
            if revision > self._seen_revision:
                await self._observe(current, revision)

    def on_watch_failed(self, error: Exception, log_level: int) -> None:
        """See WatchSink."""
        match error:
            case CompactedError():
                logger.info("control.relist replica=%s", self._name)
            case RegistryRefusedError():
                level = logging.ERROR if log_level >= logging.WARNING else log_level
                logger.log(level, "control.refused key=%s reason=%s", self._key, error)
                self._apply(AppliedControl(draining=self._applied.draining, error=f"can't be read: {error}"[:1000]))
            case RegistryError():
                logger.log(log_level, "control.retrying key=%s reason=%s", self._key, error)
            case _:
                logger.error("control.failed replica=%s", self._name, exc_info=error)

    async def _observe(self, current: KeyValue | None, revision: int) -> None:
        """The key had the value ``current`` at ``revision``: bind a drain in it if there is one, then apply it."""
        for _ in range(_BIND_TRIES):
            self._seen_revision = current.mod_revision if current is not None else revision
            decision = decide(current, self._epoch, self._applied)
            if decision.bound is None or current is None:
                if decision.applied.draining and (self._drain is None or self._drain.key == self._key):
                    self._drain = current
                self._apply(decision.applied)
                return
            claim = await self._kv.compare_and_put(self._key, decision.bound, current.mod_revision)
            current, revision = claim.current, claim.revision

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
