"""DrainAcks: waits until every live hub has applied that a replica drains, so that none sends it new requests."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from typing import Final

from omni_discovery.backoff import Backoff
from omni_discovery.clock import Clock, SystemClock
from omni_discovery.errors import RecordError, RegistryError
from omni_discovery.kv import KVStore, Listing
from omni_discovery.records import keys
from omni_discovery.records.beat import BeatRecord, read_beats
from omni_discovery.records.schema import decode_hub

logger = logging.getLogger(__name__)

#: Seconds between two reads of the beats. A hub beats at once when it sees a drain; a dead or partitioned hub does not,
#: and is awaited with growing pauses.
_FIRST_LOOK_S: Final = 0.03
_MOST_LOOK_S: Final = 0.25


def awaited_hubs(revision: int, hubs: Iterable[str], beats: Mapping[str, BeatRecord]) -> frozenset[str]:
    """The ids of those of ``hubs`` whose last beat is of an earlier revision than ``revision``, or missing."""
    return frozenset(hub_id for hub_id in hubs if hub_id not in beats or beats[hub_id].revision < revision)


async def read_awaited(kv: KVStore, namespace: str, revision: int) -> frozenset[str]:
    """The registered hubs that have not applied ``revision`` yet. Raise RegistryError.

    A record with the public key of a hub that has applied it is no other hub's, and is not among them.
    """
    # Beats are read before hubs: a hub that registers in between is awaited, never left out.
    written = await kv.list(keys.beats_prefix(namespace))
    prefix = keys.hubs_prefix(namespace)
    hubs = _hub_ids(namespace, await kv.list(prefix, keys_only=True))
    awaited = awaited_hubs(revision, hubs, read_beats(written.items, namespace, hubs))
    if not awaited or awaited == hubs:
        return awaited
    return without_copies(awaited, _public_keys(namespace, await kv.list(prefix), hubs))


def without_copies(awaited: Set[str], public_keys: Mapping[str, str]) -> frozenset[str]:
    """``awaited`` without the hubs whose public key is that of a hub that has answered: their records are copies.

    ``public_keys`` are those of all registered hubs, by hub id.
    """
    answered = {key for hub_id, key in public_keys.items() if key and hub_id not in awaited}
    return frozenset(hub_id for hub_id in awaited if public_keys.get(hub_id) not in answered)


def _hub_ids(namespace: str, listing: Listing) -> frozenset[str]:
    parsed = (keys.parse_key(namespace, item.key) for item in listing.items)
    return frozenset(key.hub_id for key in parsed if isinstance(key, keys.HubKey))


def _public_keys(namespace: str, listing: Listing, hubs: Set[str]) -> dict[str, str]:
    """The public keys of those of ``hubs`` whose records can be read, by hub id."""
    found = {}
    for item in listing.items:
        key = keys.parse_key(namespace, item.key)
        if isinstance(key, keys.HubKey) and key.hub_id in hubs:
            with suppress(RecordError):
                found[key.hub_id] = decode_hub(item.key, key.hub_id, item.value).curve_public_key
    return found


class DrainAcks:
    """Waits for the beats of all hubs of a namespace; lives on one event loop.

    ``on_acknowledged`` is called once, when every hub that is registered and not in ``revoked()`` has applied the
    awaited revision.
    """

    def __init__(
        self,
        kv: KVStore,
        namespace: str,
        revoked: Callable[[], Set[str]],
        on_acknowledged: Callable[[], None],
        *,
        clock: Clock | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._kv = kv
        self._namespace = namespace
        self._revoked = revoked
        self._on_acknowledged = on_acknowledged
        self._clock = clock or SystemClock()
        self._jitter = jitter
        self._task: asyncio.Task[None] | None = None
        #: Ids of the hubs that have not acknowledged yet; None before the first read. Swapped whole.
        self.awaited: frozenset[str] | None = None

    def await_revision(self, revision: int) -> None:
        """The record says ``draining`` since ``revision``: begin to wait, unless that has begun already."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(revision), name="drain-acks")

    def stop_waiting(self) -> None:
        """The record is gone; the next one will have another revision."""
        if self._task is not None:
            self._task.cancel()
        self._task, self.awaited = None, None

    async def close(self) -> None:
        """Stop waiting. Idempotent."""
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
        self._on_acknowledged()
