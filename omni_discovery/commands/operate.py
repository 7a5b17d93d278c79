"""The control key of one replica: write it, wait for the replica's answer, follow a drain to its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from omni_discovery.errors import ConfigError, OmniError, RecordError, RegistryError, RegistryUnavailableError
from omni_discovery.kv import DeleteEvent, KeyValue, KVCalls, KVStore
from omni_discovery.records import keys
from omni_discovery.records.control import ControlError, answered_revision, changed_value, parse
from omni_discovery.records.schema import ReplicaInfo, ReplicaRecord, ReplicaStatus, decode_replica
from omni_discovery.registration.drain_acks import read_awaited

_POLL_S: Final = 0.1
_WRITE_TRIES: Final = 10
#: How long etcd may take to tell what a record said before it was deleted.
_LAST_WORDS_S: Final = 10.0


class OperationFailedError(OmniError):
    """The operator must act: the change did not take effect; the message says how far it got."""


class UnansweredError(OperationFailedError):
    """The replica has not answered a change of its control key in time."""


class DrainEnd(StrEnum):
    """How a drain ended."""

    DRAINED = "drained"
    #: The process with the epoch to drain has ended without reporting that its drain was done.
    DIED = "died"
    TIMED_OUT = "timed-out"


@dataclass(frozen=True, slots=True)
class Target:
    """One replica of one namespace, as ``STAGE/REPLICA`` names it."""

    namespace: str
    stage_id: int
    replica_id: int

    def __str__(self) -> str:
        return f"{self.stage_id}/{self.replica_id}"

    @property
    def record_key(self) -> str:
        """The etcd key of its record."""
        return keys.replica_key(self.namespace, self.stage_id, self.replica_id)

    @property
    def control_key(self) -> str:
        """The etcd key of its control value."""
        return keys.replica_control_key(self.namespace, self.stage_id, self.replica_id)


async def read_replica(kv: KVCalls, target: Target) -> ReplicaInfo | None:
    """Return the replica as registered now; None if it is not registered, or its record can't be read."""
    item = await kv.get(target.record_key)
    if item is None:
        return None
    try:
        record = decode_replica(item.key, target.stage_id, target.replica_id, item.value)
    except RecordError:
        return None
    return record.to_info(item.create_revision)


async def must_be_registered(kv: KVCalls, target: Target) -> ReplicaInfo:
    """Return the replica as registered now. Raise ConfigError that names the registered ones if it is not."""
    info = await read_replica(kv, target)
    if info is not None:
        return info
    listing = await kv.list(keys.replicas_prefix(target.namespace))
    found = [parsed for item in listing.items if (parsed := keys.parse_key(target.namespace, item.key)) is not None]
    names = [f"{key.stage_id}/{key.replica_id}" for key in found if isinstance(key, keys.ReplicaKey)]
    there = f"there are: {', '.join(names[:20])}" if names else "no replica is"
    raise ConfigError(f"no replica {target} is registered in namespace {target.namespace!r}; {there}")


async def is_last_to_serve(kv: KVCalls, target: Target) -> bool:
    """Whether no other registered replica of the target's stage takes new requests."""
    for item in (await kv.list(keys.replicas_prefix(target.namespace, target.stage_id))).items:
        key = keys.parse_key(target.namespace, item.key)
        if not isinstance(key, keys.ReplicaKey):
            continue
        try:
            record = decode_replica(item.key, key.stage_id, key.replica_id, item.value)
        except RecordError:
            continue
        if key.replica_id != target.replica_id and record.to_info(item.create_revision).takes_new_work:
            return False
    return True


async def write_control(kv: KVCalls, target: Target, changes: dict[str, Any]) -> int:
    """Change some fields of the control value and keep the others; return its revision, 0 if no key is left.

    A change to None removes the field. Raise OperationFailedError if others keep writing the key meanwhile.
    """
    revision, _former = await _replace_control(kv, target, changes)
    return revision


async def _replace_control(kv: KVCalls, target: Target, changes: dict[str, Any]) -> tuple[int, KeyValue | None]:
    """As ``write_control``; return the key as it was before, too."""
    for _ in range(_WRITE_TRIES):
        current = await kv.get(target.control_key)
        value = changed_value(current.value if current else None, changes)
        if value is None:
            if current is None or await kv.delete(target.control_key, current.mod_revision):
                return 0, current
            continue
        if current is None:
            claim = await kv.create(target.control_key, value)
        else:
            claim = await kv.compare_and_put(target.control_key, value, current.mod_revision)
        if claim.won and claim.current is not None:
            return claim.current.mod_revision, current
    raise OperationFailedError(f"others keep writing {target.control_key}: nothing was changed")


async def wait_answered(kv: KVCalls, target: Target, revision: int, timeout_s: float) -> ReplicaInfo | None:
    """Wait until the replica has answered that revision of its control key (0: the key's absence).

    Return its record, or None if it has left the registry meanwhile. Raise OperationFailedError if it rejects the
    value, or has not answered within ``timeout_s`` seconds.
    """
    info = None
    try:
        async with asyncio.timeout(timeout_s):
            while (info := await read_replica(kv, target)) is not None:
                answered = answered_revision(info.control_revision, info.control_error)
                if answered >= revision > 0 or (revision == 0 and answered == 0):
                    break
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise UnansweredError(
            f"replica {target} did not answer revision {revision} of {target.control_key} within {timeout_s:g} s; "
            "the key stands, and holds as soon as it does"
        ) from None
    if info is not None and info.control_error:
        raise OperationFailedError(f"replica {target} did not do it: {info.control_error}")
    return info


async def steer(
    kv: KVCalls, target: Target, before: ReplicaInfo, changes: dict[str, Any], timeout_s: float
) -> ReplicaInfo:
    """Change the control value of the process that ``before`` describes, and return its record once it has answered.

    If it does not answer, or has ended, the change is taken back: the key would steer whoever has that id next. Raise
    OperationFailedError then, and if the replica rejects the value.
    """
    revision, former = await _replace_control(kv, target, changes)
    where = f"process {before.pid} on {before.host}"
    try:
        info = await wait_answered(kv, target, revision, timeout_s)
        problem = f"has ended meanwhile ({where})"
        if info is not None and _process_of(info) == _process_of(before):
            return info
    except UnansweredError:
        problem = f"did not answer within {timeout_s:g} s: is its {where} well?"
    # Whoever has written the key since then is right.
    if former is None:
        await kv.delete(target.control_key, revision)
    else:
        await kv.compare_and_put(target.control_key, former.value, revision)
    raise OperationFailedError(
        f"replica {target} {problem}; the change was taken back, so that it does not hold for whoever has that id next"
    )


def _process_of(info: ReplicaInfo) -> tuple[int, str, str]:
    return info.pid, info.host, info.curve_public_key


async def take_back_cordon(kv: KVCalls, target: Target, timeout_s: float) -> ReplicaInfo | None:
    """Have a replica take work again that is cordoned though no key says so; return its record, as wait_answered."""
    revision = await write_control(kv, target, {"cordon": False})
    await wait_answered(kv, target, revision, timeout_s)
    return await wait_answered(kv, target, await write_control(kv, target, {"cordon": None}), timeout_s)


async def undo(
    kv: KVCalls, target: Target, before: ReplicaInfo, changes: dict[str, Any], timeout_s: float
) -> ReplicaInfo | None:
    """Remove fields of the control value of a registered replica; return its record, as wait_answered."""
    revision = await write_control(kv, target, changes)
    if not before.control_revision and before.cordoned and "cordon" in changes:
        return await take_back_cordon(kv, target, timeout_s)
    return await wait_answered(kv, target, revision, timeout_s)


class OperatorAction(StrEnum):
    """What an operator does to one replica by its control key."""

    CORDON = "cordon"
    UNCORDON = "uncordon"
    DRAIN = "drain"
    WEIGHT = "weight"


async def act(
    kv: KVCalls, target: Target, before: ReplicaInfo, action: OperatorAction, weight: float | None, timeout_s: float
) -> str:
    """Do it to the process that ``before`` describes; return what was done, as a sentence. A drain goes on by itself.

    ``weight`` is that of WEIGHT, None for the replica's own. Raise OperationFailedError, RegistryError.
    """
    match action:
        case OperatorAction.CORDON:
            info = await steer(kv, target, before, {"cordon": True}, timeout_s)
            return f"replica {target} is cordoned: it takes nothing new ({info.queue_length} in flight)"
        case OperatorAction.UNCORDON:
            return await _undone(kv, target, before, {"cordon": None}, "takes work again", timeout_s)
        case OperatorAction.WEIGHT if weight is None:
            return await _undone(kv, target, before, {"weight": None}, "has its own weight again", timeout_s)
        case OperatorAction.WEIGHT:
            await steer(kv, target, before, {"weight": weight}, timeout_s)
            return f"replica {target} weighs {weight:g}"
        case OperatorAction.DRAIN:
            revision = await write_control(kv, target, {"drain": True, "epoch": before.epoch})
            left = await wait_answered(kv, target, revision, timeout_s)
            flight = f", {left.queue_length} in flight" if left is not None else ""
            return f"replica {target} drains{flight}: it ends by itself when that is done"


async def _undone(
    kv: KVCalls, target: Target, before: ReplicaInfo, changes: dict[str, Any], done: str, timeout_s: float
) -> str:
    info = await undo(kv, target, before, changes, timeout_s)
    return f"replica {target} {done}" if info is not None else f"replica {target} has left meanwhile"


@dataclass(frozen=True, slots=True)
class DrainStep:
    """How far a drain is: the requests in flight, and the ids of hubs that have not acknowledged it yet."""

    in_flight: int
    awaited: frozenset[str] = frozenset()


class _DrainReader:
    """Reads the progress of the drain of one replica process, which its epoch names."""

    def __init__(self, kv: KVStore, target: Target, epoch: int) -> None:
        self._kv = kv
        self._target = target
        self._epoch = epoch
        #: The first revision at which the record was seen ``draining``; 0 while it is not.
        self._draining_at = 0
        #: The latest revision of the record that was seen.
        self._seen_revision = 0

    async def step(self) -> DrainStep | None:
        """Return the progress; None when the process with that epoch is gone. Raise RegistryUnavailableError."""
        item = await self._kv.get(self._target.record_key)
        if item is None or item.create_revision != self._epoch:
            return None
        self._seen_revision = item.mod_revision
        try:
            record = self._decode(item)
        except RecordError:
            return DrainStep(0)
        if record.status is not ReplicaStatus.DRAINING:
            return DrainStep(record.queue_length)
        self._draining_at = self._draining_at or item.mod_revision
        return DrainStep(record.queue_length, await read_awaited(self._kv, self._target.namespace, self._draining_at))

    def _decode(self, item: KeyValue) -> ReplicaRecord:
        return decode_replica(item.key, self._target.stage_id, self._target.replica_id, item.value)

    async def has_withdrawn(self) -> bool:
        """Whether a record that is gone said ``down`` before: its process ended in order. Never raises."""
        status: ReplicaStatus | None = None
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                batches = self._kv.watch_key(self._target.record_key, self._seen_revision)
                async with contextlib.aclosing(batches):
                    async for batch in batches:
                        for event in batch.events:
                            if isinstance(event, DeleteEvent):
                                return status is ReplicaStatus.DOWN
                            status = self._decode(event.item).status
        except (TimeoutError, RegistryError, RecordError):
            pass
        return False


async def wait_drained(
    kv: KVStore, target: Target, epoch: int, timeout_s: float, on_progress: Callable[[DrainStep], None]
) -> DrainEnd:
    """Wait until the replica's process with that epoch is gone, at most ``timeout_s`` seconds; return how it ended.

    ``on_progress`` is called at each poll.
    """
    reader = _DrainReader(kv, target, epoch)
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                # The drain goes on while etcd is away, and so does the wait for its end.
                with contextlib.suppress(RegistryUnavailableError):
                    step = await reader.step()
                    if step is None:
                        break
                    on_progress(step)
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        return DrainEnd.TIMED_OUT
    current = await kv.get(target.control_key)
    try:
        stands = current is not None and parse(current.value).epoch == epoch
    except ControlError:
        stands = False
    if not stands:
        return DrainEnd.DRAINED
    # The process was killed, or may not write the key: its drain order is left, and nothing else would remove it.
    await write_control(kv, target, {"drain": None, "epoch": None})
    return DrainEnd.DRAINED if await reader.has_withdrawn() else DrainEnd.DIED
