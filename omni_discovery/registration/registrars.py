"""The two kinds of leased keys: a replica's, with a free id of its stage, the lowest among few, and a hub's."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from omni_discovery.clock import Clock, SystemClock
from omni_discovery.errors import (
    ConfigError,
    RecordError,
    RegistryDeniedError,
    RegistryUnavailableError,
)
from omni_discovery.kv import FirstKeys, KeyValue, KVStore, Listing
from omni_discovery.records import keys
from omni_discovery.records.schema import HubRecord, ReplicaRecord, ReplicaStatus, encode_record
from omni_discovery.records.sizes import check_value
from omni_discovery.registration.leased_key import LeasedKey, watch_population

#: Fields that change all the time; a change of them alone is written at most once a load interval.
_SLOW_FIELDS: Final = frozenset({"queue_length", "progress"})
#: Ids that were read longer ago are read again: an id may have become free since.
_READ_FOR_S: Final = 2.0
#: So many taken ids are read at first, with the number of all. Among more, the first id to be tried is their number,
#: which is free unless there are gaps: a list of all costs etcd and the client more than all the rest.
_READ_AT_FIRST: Final = 128
#: After so many lost claims an id is not the next free one but drawn from those ahead, twice as many each time.
_CLAIMS_IN_TURN: Final = 16
_MOST_DOUBLINGS: Final = 14


def checked(record: ReplicaRecord) -> ReplicaRecord:
    """Return the record if a reader would accept it, else raise ConfigError: it must not reach the registry."""
    try:
        converted = msgspec.convert(msgspec.to_builtins(record), ReplicaRecord)
        check_value("the replica's record", encode_record(converted))
    except msgspec.ValidationError as error:
        raise ConfigError(f"the replica's record is not valid: {error}") from error
    except RecordError as error:
        raise ConfigError(
            f"the replica's record {error.reason.partition(',')[0]}, and no hub would read it: "
            "give it fewer or shorter labels and voices"
        ) from error
    return converted


def changed_record(record: ReplicaRecord, changes: Mapping[str, Any]) -> ReplicaRecord:
    """The record with ``changes`` applied. Raise ConfigError for an unknown field or a value out of range."""
    try:
        changed = msgspec.structs.replace(record, **changes)
    except TypeError as error:
        raise ConfigError(f"the replica's record has no such field: {error}") from error
    return checked(changed)


def replica_id_of(key: KeyValue) -> int:
    """The replica id in the key of a replica's record."""
    return int(key.key.rpartition("/")[2])


class ReplicaRegistrar(LeasedKey):
    """Registers one replica under ``replicas/<stage_id>/<replica_id>``.

    The record's ``replica_id`` and ``epoch`` are filled in here; ``wanted_id`` is claimed if it is free. After a loss
    the former id is claimed again if it is free. Where many claim at once, ids have gaps, and claims are few.
    Three round trips: the lease, beside it a read of the taken ids unless an id is wanted; the claim, which also reads
    the id's control key; and the record with its epoch.
    """

    def __init__(
        self, kv: KVStore, namespace: str, record: ReplicaRecord, *, wanted_id: int | None = None, **options: Any
    ) -> None:
        super().__init__(kv, **options)
        self._namespace = namespace
        self._record = record
        self._wanted_id = wanted_id
        self._registered_at_s = 0.0
        self._is_withdrawn = False
        #: The lease under which keys were claimed last, or may have been, and these ids: an answer can be lost.
        self._tried_lease_id = 0
        self._tried_ids: set[int] = set()
        #: Reads the taken ids while the lease is granted; None once that was used.
        self._reading_ids: asyncio.Task[FirstKeys] | None = None
        self._read_at_s = 0.0
        #: The control key of the claimed id, as it was when that was claimed; None if it was not read then.
        self.control_listing: Listing | None = None

    @property
    def name(self) -> str:
        """See LeasedKey."""
        return self._prefix if self._wanted_id is None else self._key_of(self._wanted_id)

    @property
    def _prefix(self) -> str:
        return keys.replicas_prefix(self._namespace, self._record.stage_id)

    def start(self) -> None:
        """Begin to register; returns at once."""
        super().start()
        if self._wanted_id is None:
            self._read_at_s = self._clock.monotonic_s()
            self._reading_ids = asyncio.create_task(self._kv.first_keys(self._prefix, _READ_AT_FIRST), name="taken-ids")
            self._tasks = (*self._tasks, self._reading_ids)
        every = keys.replicas_prefix(self._namespace)
        counting = watch_population(self._kv, every, self._load_pace, self._clock, self._jitter)
        self._tasks = (*self._tasks, asyncio.create_task(counting, name="write-budget"))

    def update(self, record: ReplicaRecord) -> None:
        """Publish ``record`` instead: at once, or as the write budget allows if only the load has changed.

        Once the withdrawal has begun, nothing else is published.
        """
        if self._is_withdrawn:
            return
        before, self._record = self._record, record
        changed = {name for name in record.__struct_fields__ if getattr(before, name) != getattr(record, name)}
        if changed:
            self._schedule_publish(at_once=not changed <= _SLOW_FIELDS)

    async def _claim(self, lease_id: int) -> KeyValue:
        self.control_listing = None
        self._registered_at_s = self._clock.wall_s()
        early, self._reading_ids = self._reading_ids, None
        is_first, self._tried_lease_id = lease_id != self._tried_lease_id, lease_id
        if is_first:
            self._tried_ids.clear()
        found, likely_id = None, self._wanted_id
        if is_first and early is not None and self._clock.monotonic_s() < self._read_at_s + _READ_FOR_S:
            found = await early
            likely_id = found.count if found.count > len(found.items) else None
        if is_first and likely_id is not None:
            # The transaction says whether the id is free, and this lease can't have a key yet.
            found, claimed = None, await self._create(likely_id, lease_id)
            if claimed is not None:
                return claimed
        items = (await self._kv.list(self._prefix, keys_only=True)).items if found is None else found.items
        return await self._claim_free_id(items, lease_id)

    async def _claim_free_id(self, items: Sequence[KeyValue], lease_id: int) -> KeyValue:
        tried = {self._key_of(number) for number in self._tried_ids}
        for item in items:
            # No other key with this lease: who may write there may attach any key to it.
            if item.lease_id == lease_id and item.key in tried:
                # Claimed by an earlier attempt whose answer was lost.
                return item
        taken = {item.key for item in items}
        free = (number for number in self._candidates() if self._key_of(number) not in taken)
        doublings = -_CLAIMS_IN_TURN
        while True:
            claimed = await self._create(next(free), lease_id)
            if claimed is not None:
                return claimed
            # Of a thousand that begin at once and all go on to the next id, only one is lucky in each round.
            doublings = min(doublings + 1, _MOST_DOUBLINGS)
            for _ in range(int(self._jitter() * 2 ** max(0, doublings))):
                next(free)

    def _candidates(self) -> Iterator[int]:
        if self._wanted_id is not None:
            yield self._wanted_id
        yield from (number for number in itertools.count() if number != self._wanted_id)

    def _key_of(self, replica_id: int) -> str:
        return keys.replica_key(self._namespace, self._record.stage_id, replica_id)

    async def _create(self, replica_id: int, lease_id: int) -> KeyValue | None:
        """Claim this id, and read its control key if this user of etcd may; return None if the id is taken."""
        control_key = keys.replica_control_key(self._namespace, self._record.stage_id, replica_id)
        # Not up yet: hubs name the epoch in requests, and this process learns it by the answer to this write.
        status = ReplicaStatus.STARTING if self._record.status is ReplicaStatus.UP else self._record.status
        value = self._encode(replica_id, 0, status)
        self._tried_ids.add(replica_id)
        try:
            claim = await self._kv.create(self._key_of(replica_id), value, lease_id, also_read=control_key)
        except RegistryDeniedError:
            claim = await self._kv.create(self._key_of(replica_id), value, lease_id)
        if claim.current is None or claim.current.lease_id != lease_id:
            return None
        self._wanted_id, self.control_listing = replica_id, claim.also_read
        return claim.current

    def _value(self, key: KeyValue) -> bytes:
        return self._encode(replica_id_of(key), key.create_revision, self._record.status)

    def _encode(self, replica_id: int, epoch: int, status: ReplicaStatus) -> bytes:
        return encode_record(
            msgspec.structs.replace(
                self._record,
                replica_id=replica_id,
                epoch=epoch,
                status=status,
                registered_at=self._registered_at_s,
                updated_at=self._clock.wall_s(),
            )
        )

    def _set_withdrawn(self) -> bool:
        self._record = msgspec.structs.replace(self._record, status=ReplicaStatus.DOWN)
        self._is_withdrawn = True
        self._schedule_publish(at_once=True)
        return True


class HubRegistrar(LeasedKey):
    """Registers one hub under ``hubs/<hub_id>``. A key left by a former life of the hub is overwritten."""

    def __init__(self, kv: KVStore, namespace: str, record: HubRecord, **options: Any) -> None:
        clock: Clock = options.get("clock") or SystemClock()
        super().__init__(kv, **options)
        self._key = keys.hub_key(namespace, record.hub_id)
        self._encoded = encode_record(msgspec.structs.replace(record, started_at=record.started_at or clock.wall_s()))

    @property
    def name(self) -> str:
        """See LeasedKey."""
        return self._key

    async def _claim(self, lease_id: int) -> KeyValue:
        current = await self._kv.get(self._key)
        if current is None:
            claim = await self._kv.create(self._key, self._encoded, lease_id)
        else:
            claim = await self._kv.compare_and_put(self._key, self._encoded, current.mod_revision, lease_id)
        if claim.current is None or claim.current.lease_id != lease_id:
            raise RegistryUnavailableError(f"{self._key} was written by another at the same moment")
        return claim.current

    def _value(self, key: KeyValue) -> bytes:
        return self._encoded

    def _set_withdrawn(self) -> bool:
        return False
