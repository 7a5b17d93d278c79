"""Acknowledgements of a drain: every live hub has applied that a replica drains, so none sends it anything more."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Final

from omni_discovery.backoff import Backoff
from omni_discovery.clock import Clock, SystemClock
from omni_discovery.errors import RecordError, RegistryError
from omni_discovery.kv import KVStore
from omni_discovery.records import keys
from omni_discovery.records.beat import BeatRecord, decode_beat

logger = logging.getLogger(__name__)

#: A hub beats at once when it sees somebody drain; one that is dead or cut off is looked for less often.
_FIRST_LOOK_S: Final = 0.03
_MOST_LOOK_S: Final = 0.25


def awaited_hubs(revision: int, hubs: Iterable[str], beats: Mapping[str, BeatRecord]) -> frozenset[str]:
    """Those of ``hubs`` whose beats don't say yet that they have applied ``revision``."""
    return frozenset(hub_id for hub_id in hubs if hub_id not in beats or beats[hub_id].revision < revision)


async def read_awaited(kv: KVStore, namespace: str, revision: int) -> frozenset[str]:
    """The registered hubs that have not applied ``revision`` yet. Raise RegistryError."""
    # The hubs after their beats: one that comes in between is one more to wait for, never one forgotten.
    beats: dict[str, BeatRecord] = {}
    for item in (await kv.list(keys.beats_prefix(namespace))).items:
        key = keys.parse_key(namespace, item.key)
        try:
            if isinstance(key, keys.BeatKey):
                beats[key.hub_id] = decode_beat(item.key, item.value)
        except RecordError:
            # A beat that can't be read says nothing.
            continue
    listing = await kv.list(keys.hubs_prefix(namespace), keys_only=True)
    parsed = (keys.parse_key(namespace, item.key) for item in listing.items)
    return awaited_hubs(revision, {key.hub_id for key in parsed if isinstance(key, keys.HubKey)}, beats)


class DrainAcks:
    """Waits for the beats of all hubs of a namespace; lives on one event loop.

    ``tell`` comes once, when every hub that is registered and not in ``revoked()`` has applied the revision asked for.
    """

    def __init__(
        self,
        kv: KVStore,
        namespace: str,
        revoked: Callable[[], Set[str]],
        tell: Callable[[], None],
        *,
        clock: Clock | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._kv = kv
        self._namespace = namespace
        self._revoked = revoked
        self._tell = tell
        self._clock = clock or SystemClock()
        self._jitter = jitter
        self._task: asyncio.Task[None] | None = None
        #: Who has not answered yet; None while that is not known. Swapped whole.
        self.awaited: frozenset[str] | None = None

    def ask(self, revision: int) -> None:
        """The record has said ``draining`` since ``revision``. Asked again before ``forget``, nothing happens."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(revision), name="drain-acks")

    def forget(self) -> None:
        """The record stands no more; the next one will have another revision."""
        if self._task is not None:
            self._task.cancel()
        self._task, self.awaited = None, None

    async def close(self) -> None:
        """Wait for nobody any more. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self, revision: int) -> None:
        backoff = Backoff(_FIRST_LOOK_S, _MOST_LOOK_S, self._jitter)
        while True:
            try:
                awaited = await read_awaited(self._kv, self._namespace, revision)
                self.awaited = awaited - self._revoked()
                if not self.awaited:
                    break
            except RegistryError as error:
                logger.debug("drain.not_looked revision=%d reason=%s", revision, error)
            except Exception:
                logger.exception("drain.failed revision=%d", revision)
            await self._clock.sleep(backoff.next_delay_s())
        logger.info("drain.acknowledged revision=%d", revision)
        self._tell()
