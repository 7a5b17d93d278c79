"""Which ids replicas get that register at the same moment, and how many claims it takes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable

import pytest

from omni_discovery.kv import Claim, FirstKeys, Listing
from omni_discovery.records import keys
from omni_discovery.records.schema import ReplicaRecord, ReplicaStatus
from omni_discovery.registration.leased_key import Listener
from omni_discovery.registration.registrars import ReplicaRegistrar, replica_id_of
from omni_discovery.testing import FakeKV, ManualClock, settle

RECORD = ReplicaRecord(
    stage_id=0, replica_id=0, input_addr="tcp://h:1", output_addr="tcp://h:2", status=ReplicaStatus.UP
)


class CountingKV(FakeKV):
    """Says to everybody that no id is taken, as to those that list all at once, and lets others go first."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.claims = 0

    async def list(self, prefix: str, *, keys_only: bool = False) -> Listing:
        found = await super().list(prefix, keys_only=keys_only)
        return Listing(found.revision, found.cluster_id, ()) if keys_only else found

    async def create(self, key: str, value: bytes, lease_id: int = 0, *, also_read: str | None = None) -> Claim:
        self.claims += 1
        claim = await super().create(key, value, lease_id, also_read=also_read)
        await asyncio.sleep(0)
        return claim


class ListedKV(FakeKV):
    """Counts the lists of a whole prefix, and the claims."""

    lists = claims = 0

    async def list(self, prefix: str, *, keys_only: bool = False) -> Listing:
        self.lists += 1
        return await super().list(prefix, keys_only=keys_only)

    async def first_keys(self, prefix: str, limit: int) -> FirstKeys:
        self.lists -= 1
        return await super().first_keys(prefix, limit)

    async def create(self, key: str, value: bytes, lease_id: int = 0, *, also_read: str | None = None) -> Claim:
        self.claims += 1
        return await super().create(key, value, lease_id, also_read=also_read)


async def registered_among(ids: Iterable[int]) -> tuple[int, int, int]:
    """The id of one replica that registers while those ids are taken; how many claims and whole lists it took."""
    clock, taken = ManualClock(), list[int]()
    kv = ListedKV(clock)
    for number in ids:
        await kv.put(keys.replica_key("default", 0, number), b"")
    listener = Listener(on_registered=lambda key: taken.append(replica_id_of(key)))
    registrar = ReplicaRegistrar(kv, "default", RECORD, clock=clock, listener=listener)
    registrar.start()
    await settle()
    claims, lists = kv.claims, kv.lists
    await registrar.close()
    return taken[0], claims, lists


async def test_among_few_it_is_the_lowest_free_id_and_nothing_is_listed() -> None:
    assert await registered_among([0, 1, 2, 4, 5]) == (3, 1, 0)
    assert await registered_among(range(127)) == (127, 1, 0)


async def test_among_many_it_is_their_number_and_nothing_is_listed() -> None:
    """Keys are read in the order of text, so the first hundred of a thousand ids say little about gaps."""
    assert await registered_among(range(1000)) == (1000, 1, 0)


async def test_among_many_with_gaps_the_lowest_free_id_is_taken_if_their_number_is_taken() -> None:
    assert await registered_among(set(range(1000)) - {700}) == (700, 2, 1)


@pytest.mark.attack("Z13")
@pytest.mark.parametrize("name", ["!x", "77", "7/7"])
async def test_a_stray_key_with_its_lease_is_not_taken_for_its_own(name: str) -> None:
    """1. somebody attaches a key to a replica's lease, and deletes its record; 2. it registers again as what it was"""
    clock, taken = ManualClock(), list[str]()
    kv = FakeKV(clock)
    listener = Listener(on_registered=lambda key: taken.append(key.key))
    registrar = ReplicaRegistrar(kv, "default", RECORD, clock=clock, listener=listener)
    registrar.start()
    await settle()
    prefix = keys.replicas_prefix("default", 0)
    await kv.put(f"{prefix}{name}", b"x", registrar.lease_id)
    await kv.delete(f"{prefix}0")
    await settle()
    assert taken == [f"{prefix}0"] * 2
    assert (await kv.get(f"{prefix}{name}")).value == b"x"  # type: ignore[union-attr]
    await registrar.close()


async def registered_at_once(count: int) -> tuple[list[int], int]:
    """The ids that so many replicas get, in order, and how many claims they made."""
    clock, chance, ids = ManualClock(), random.Random(3), list[int]()
    kv = CountingKV(clock)
    listener = Listener(on_registered=lambda key: ids.append(replica_id_of(key)))
    registrars = [
        ReplicaRegistrar(kv, "default", RECORD, clock=clock, jitter=chance.random, listener=listener)
        for _ in range(count)
    ]
    for registrar in registrars:
        registrar.start()
    for _ in range(100):
        await settle()
        if len(ids) == count:
            break
    claims = kv.claims
    for registrar in registrars:
        for task in registrar._tasks:
            task.cancel()
        if registrar._own_key_watch is not None:
            registrar._own_key_watch.cancel()
    await settle()
    return sorted(ids), claims


@pytest.mark.parametrize("count", [1, 4, 16])
async def test_up_to_sixteen_that_register_at_once_get_the_lowest_ids(count: int) -> None:
    assert (await registered_at_once(count))[0] == list(range(count))


@pytest.mark.parametrize("count", [100, 400])
async def test_many_that_register_at_once_need_few_claims_each(count: int) -> None:
    """All begin with id 0; if each went on to the next one, it would take half as many rounds as there are replicas"""
    ids, claims = await registered_at_once(count)
    assert len(set(ids)) == len(ids) == count
    assert claims < 30 * count
    assert ids[-1] < 8 * count
