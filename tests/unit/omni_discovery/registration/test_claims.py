"""Which ids replicas get that register at the same moment, and how many claims it takes."""

from __future__ import annotations

import asyncio
import random

import pytest

from omni_discovery.kv import Claim, Listing
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
