"""The two kinds of leased keys: a replica's, with the lowest free id of its stage, and a hub's, with a fixed name."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from omni_discovery.clock import Clock, SystemClock
from omni_discovery.errors import ConfigError, RecordError, RegistryUnavailableError
from omni_discovery.kv import Claim, KeyValue, KVStore
from omni_discovery.records import keys
from omni_discovery.records.schema import HubRecord, ReplicaRecord, ReplicaStatus, encode_record
from omni_discovery.records.sizes import check_value
from omni_discovery.registration.leased_key import LeasedKey, watch_population

#: Fields that change all the time; a change of them alone is written at most once a load interval.
_SLOW_FIELDS: Final = frozenset({"queue_length", "progress"})


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
    the former id is claimed again if it is free.
    """

    def __init__(
        self, kv: KVStore, namespace: str, record: ReplicaRecord, *, wanted_id: int | None = None, **options: Any
    ) -> None:
        super().__init__(kv, **options)
        self._namespace = namespace
        self._record = record
        self._wanted_id = wanted_id
        self._registered_at_s = 0.0

    @property
    def name(self) -> str:
        """See LeasedKey."""
        if self._wanted_id is None:
            return keys.replicas_prefix(self._namespace, self._record.stage_id)
        return keys.replica_key(self._namespace, self._record.stage_id, self._wanted_id)

    def start(self) -> None:
        """Begin to register; returns at once."""
        super().start()
        every = keys.replicas_prefix(self._namespace)
        counting = watch_population(self._kv, every, self._load_pace, self._clock, self._jitter)
        self._tasks = (*self._tasks, asyncio.create_task(counting, name="write-budget"))

    def update(self, record: ReplicaRecord) -> None:
        """Publish ``record`` instead: at once, or as the write budget allows if only the load has changed."""
        before, self._record = self._record, record
        changed = {name for name in record.__struct_fields__ if getattr(before, name) != getattr(record, name)}
        if changed:
            self._schedule_publish(at_once=not changed <= _SLOW_FIELDS)

    async def _claim(self, lease_id: int) -> KeyValue:
        prefix = keys.replicas_prefix(self._namespace, self._record.stage_id)
        listing = await self._kv.list(prefix, keys_only=True)
        taken = set()
        for item in listing.items:
            if item.lease_id == lease_id:
                # Claimed by an earlier attempt whose answer was lost.
                return item
            parsed = keys.parse_key(self._namespace, item.key)
            if isinstance(parsed, keys.ReplicaKey):
                taken.add(parsed.replica_id)
        self._registered_at_s = self._clock.wall_s()
        for replica_id in self._candidates(taken):
            claim = await self._create(replica_id, lease_id)
            if claim.current is not None and claim.current.lease_id == lease_id:
                self._wanted_id = replica_id
                return claim.current
        raise AssertionError("the candidates never end")

    def _candidates(self, taken: set[int]) -> Iterator[int]:
        if self._wanted_id is not None and self._wanted_id not in taken:
            yield self._wanted_id
        yield from (number for number in itertools.count() if number not in taken and number != self._wanted_id)

    async def _create(self, replica_id: int, lease_id: int) -> Claim:
        key = keys.replica_key(self._namespace, self._record.stage_id, replica_id)
        # Not up yet: hubs name the epoch in requests, and this process learns it by the answer to this write.
        status = ReplicaStatus.STARTING if self._record.status is ReplicaStatus.UP else self._record.status
        return await self._kv.create(key, self._encode(replica_id, 0, status), lease_id)

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
        self.update(msgspec.structs.replace(self._record, status=ReplicaStatus.DOWN))
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
