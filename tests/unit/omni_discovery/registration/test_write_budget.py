"""How often a replica may write its load, alone and among thousands."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from omni_discovery.records import keys
from omni_discovery.records.schema import ReplicaRecord, ReplicaStatus
from omni_discovery.registration.leased_key import LoadPace, watch_population
from omni_discovery.registration.registrars import ReplicaRegistrar, changed_record
from omni_discovery.testing import FakeKV, ManualClock, settle

NS = "default"


@pytest.mark.parametrize(("replicas", "interval_s"), [(1, 0.5), (100, 0.5), (200, 1.0), (1000, 5.0), (5000, 25.0)])
def test_the_interval_grows_with_the_population(replicas: int, interval_s: float) -> None:
    pace = LoadPace(0.5)
    pace.set_replica_count(replicas)
    assert pace.interval_s == interval_s


def test_a_burst_over_a_thousand_silent_replicas_stays_within_the_budget() -> None:
    """All change their load at the same moment and go on changing it: no second has more than about 200 writes."""
    chance, written = random.Random(7), Counter[int]()
    for _ in range(1000):
        pace = LoadPace(0.5)
        pace.set_replica_count(1000)
        at_s = pace.next_write_s(float("-inf"), 100.0, chance.random())
        while at_s < 120.0:
            written[int(at_s)] += 1
            at_s = pace.next_write_s(at_s, at_s + 0.01, chance.random())
    assert max(written.values()) < 260
    assert sum(written.values()) / 20 < 205


def test_few_replicas_do_not_wait_for_anybody() -> None:
    pace = LoadPace(0.5)
    assert pace.next_write_s(10.0, 50.0, 0.9) == 10.5


async def test_a_replica_learns_how_many_there_are_and_slows_down() -> None:
    clock = ManualClock()
    kv, pace = FakeKV(clock), LoadPace(0.5)
    for number in range(400):
        await kv.put(keys.replica_key(NS, number % 4, number), b"")
    task = asyncio.create_task(watch_population(kv, keys.replicas_prefix(NS), pace, clock, lambda: 0.5))
    await clock.advance(1.0)
    assert pace.interval_s == 2.0
    kv.is_out = True
    await clock.advance(20.0)
    assert pace.interval_s == 2.0
    kv.is_out = False
    for number in range(400):
        await kv.delete(keys.replica_key(NS, number % 4, number))
    await clock.advance(40.0)
    assert pace.interval_s == 0.5
    task.cancel()


async def test_load_is_stretched_and_status_is_not() -> None:
    """1. among 2000 replicas, a load waits up to 10 s after the last write
    2. a status change in between is written at once, and takes the load along
    """
    clock = ManualClock()
    kv = FakeKV(clock)
    for number in range(1, 2000):
        await kv.put(keys.replica_key(NS, 1, number), b"")
    record = ReplicaRecord(stage_id=0, replica_id=0, input_addr="i", output_addr="o", status=ReplicaStatus.UP)
    registrar = ReplicaRegistrar(kv, NS, record, clock=clock, jitter=lambda: 0.5)
    registrar.start()
    await clock.advance(1.0)

    async def written() -> int:
        item = await kv.get(keys.replica_key(NS, 0, 0))
        assert item is not None
        return item.mod_revision

    before = await written()
    for length in range(1, 40):
        registrar.update(record := changed_record(record, {"queue_length": length}))
        await clock.advance(0.1)
    assert await written() == before
    registrar.update(record := changed_record(record, {"status": ReplicaStatus.DRAINING}))
    await settle()
    after = await written()
    assert after > before
    registrar.update(changed_record(record, {"queue_length": 1}))
    await clock.advance(9.0)
    assert await written() == after
    await clock.advance(1.5)
    assert await written() > after
    await registrar.close()
