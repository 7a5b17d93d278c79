"""Writing control keys and waiting for answers, on a registry in memory."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from omni_discovery.commands.operate import (
    DrainEnd,
    DrainStep,
    OperationFailedError,
    Target,
    is_last_to_serve,
    must_be_registered,
    steer,
    take_back_cordon,
    wait_answered,
    wait_drained,
    write_control,
)
from omni_discovery.errors import ConfigError
from omni_discovery.records import keys
from omni_discovery.records.schema import ReplicaRecord, ReplicaStatus, encode_record
from omni_discovery.testing import FakeKV, ManualClock

TARGET = Target("n", 0, 1)


@pytest.fixture
def kv() -> FakeKV:
    return FakeKV(ManualClock())


async def register(kv: FakeKV, **fields: Any) -> int:
    """Write the target's record; return its epoch."""
    known = {"status": ReplicaStatus.UP, "input_addr": "in", "output_addr": "out", **fields}
    await kv.put(TARGET.record_key, encode_record(ReplicaRecord(stage_id=0, replica_id=1, **known)))
    item = await kv.get(TARGET.record_key)
    assert item is not None
    return item.create_revision


async def control(kv: FakeKV) -> Any:
    item = await kv.get(TARGET.control_key)
    return None if item is None else json.loads(item.value)


async def test_an_unknown_replica_is_told_with_those_that_there_are(kv: FakeKV) -> None:
    with pytest.raises(ConfigError, match="no replica is"):
        await must_be_registered(kv, TARGET)
    await kv.put(keys.replica_key("n", 3, 4), b"{}")
    with pytest.raises(ConfigError, match=r"no replica 0/1 .* there are: 3/4"):
        await must_be_registered(kv, TARGET)


async def test_the_last_that_takes_work_of_a_stage_is_known(kv: FakeKV) -> None:
    """1. alone in its stage, whatever other stages have; 2. with one that is cordoned or unreadable; 3. with another"""

    async def put(stage_id: int, replica_id: int, **more: Any) -> None:
        known = {"status": ReplicaStatus.UP, "input_addr": "in", "output_addr": "out", **more}
        record = ReplicaRecord(stage_id=stage_id, replica_id=replica_id, **known)
        await kv.put(keys.replica_key("n", stage_id, replica_id), encode_record(record))

    await register(kv)
    await put(1, 2)
    assert await is_last_to_serve(kv, TARGET)
    await put(0, 2, cordoned=True)
    await kv.put(keys.replica_key("n", 0, 3), b"nonsense")
    assert await is_last_to_serve(kv, TARGET)
    await put(0, 4)
    assert not await is_last_to_serve(kv, TARGET)


async def test_each_part_of_a_key_is_written_without_the_others_being_lost(kv: FakeKV) -> None:
    assert await write_control(kv, TARGET, {"cordon": True}) > 0
    assert await write_control(kv, TARGET, {"weight": 2}) > 0
    assert await control(kv) == {"cordon": True, "weight": 2}
    assert await write_control(kv, TARGET, {"cordon": None}) > 0
    assert await control(kv) == {"weight": 2}
    assert await write_control(kv, TARGET, {"weight": None}) == 0
    assert await control(kv) is None
    assert await write_control(kv, TARGET, {"weight": None}) == 0


async def test_a_value_that_can_not_be_read_is_replaced(kv: FakeKV) -> None:
    await kv.put(TARGET.control_key, b'{"cordn": true}')
    await write_control(kv, TARGET, {"cordon": True})
    assert await control(kv) == {"cordon": True}


async def test_an_answer_is_taken_for_what_it_says(kv: FakeKV) -> None:
    await register(kv, control_revision=8)
    found = await wait_answered(kv, TARGET, 8, 1.0)
    assert found is not None
    await register(kv, control_revision=8, control_error="revision 9: no")
    with pytest.raises(OperationFailedError, match="revision 9: no"):
        await wait_answered(kv, TARGET, 9, 1.0)
    with pytest.raises(OperationFailedError, match="did not answer revision 10"):
        await wait_answered(kv, TARGET, 10, 0.15)
    await kv.delete(TARGET.record_key)
    assert await wait_answered(kv, TARGET, 10, 1.0) is None


async def test_a_change_that_is_answered_stands(kv: FakeKV) -> None:
    await register(kv, pid=5)
    before = await must_be_registered(kv, TARGET)
    steering = asyncio.create_task(steer(kv, TARGET, before, {"cordon": True}, 30.0))
    revision = await written(kv)
    await register(kv, pid=5, cordoned=True, control_revision=revision)
    assert (await steering).cordoned
    assert await control(kv) == {"cordon": True}


@pytest.mark.parametrize("former", [None, {"weight": 2}])
@pytest.mark.parametrize("end", ["silent", "gone", "replaced"])
async def test_a_change_for_a_dead_replica_is_taken_back_before_another_has_its_id(
    kv: FakeKV, end: str, former: dict[str, Any] | None
) -> None:
    """The process says nothing; or its record goes; or another process has the id, and answers."""
    if former is not None:
        await write_control(kv, TARGET, former)
    await register(kv, pid=5)
    before = await must_be_registered(kv, TARGET)
    timeout_s = 0.15 if end == "silent" else 30.0
    steering = asyncio.create_task(steer(kv, TARGET, before, {"cordon": True}, timeout_s))
    revision = await written(kv)
    if end != "silent":
        await kv.delete(TARGET.record_key)
    if end == "replaced":
        await register(kv, pid=6, cordoned=True, control_revision=revision)
    with pytest.raises(OperationFailedError, match="the change was taken back"):
        await steering
    assert await control(kv) == former


async def test_what_others_write_meanwhile_is_not_taken_back(kv: FakeKV) -> None:
    await register(kv)
    before = await must_be_registered(kv, TARGET)
    steering = asyncio.create_task(steer(kv, TARGET, before, {"cordon": True}, 0.15))
    await written(kv)
    await write_control(kv, TARGET, {"weight": 3})
    with pytest.raises(OperationFailedError):
        await steering
    assert await control(kv) == {"cordon": True, "weight": 3}


async def test_a_cordon_without_a_key_is_taken_back_by_a_key_that_says_so_and_goes(kv: FakeKV) -> None:
    await register(kv, cordoned=True)
    undoing = asyncio.create_task(take_back_cordon(kv, TARGET, 30.0))
    revision = await written(kv, {"cordon": False})
    await register(kv, control_revision=revision)
    for _ in range(3000):
        if await kv.get(TARGET.control_key) is None:
            break
        await asyncio.sleep(0.01)
    await register(kv)
    found = await undoing
    assert found is not None
    assert not found.cordoned


async def written(kv: FakeKV, wanted: dict[str, Any] | None = None) -> int:
    """Wait until the control key says that, by default that it is cordoned; return its revision."""
    for _ in range(3000):
        if (wanted or {"cordon": True}).items() <= (await control(kv) or {}).items():
            break
        await asyncio.sleep(0.01)
    item = await kv.get(TARGET.control_key)
    assert item is not None
    return item.mod_revision


async def test_a_drain_is_done_when_the_life_is_over_and_its_key_is_gone(kv: FakeKV) -> None:
    """1. two in flight, then none, and the record goes; 2. etcd is away for a moment meanwhile, which ends nothing."""
    epoch = await register(kv, status=ReplicaStatus.DRAINING, queue_length=2)
    seen: list[DrainStep] = []
    await kv.put(keys.hub_key("n", "hub-1"), b"{}")
    waiting = asyncio.create_task(wait_drained(kv, TARGET, epoch, 10.0, seen.append))
    await asyncio.sleep(0.05)
    kv.is_out = True
    await asyncio.sleep(0.15)
    kv.is_out = False
    await kv.delete(TARGET.record_key)
    assert await waiting is DrainEnd.DRAINED
    assert seen[0] == DrainStep(2, frozenset({"hub-1"}))


async def test_a_life_that_ended_with_its_drain_key_standing_was_killed_and_the_key_is_cleared(kv: FakeKV) -> None:
    epoch = await register(kv)
    await write_control(kv, TARGET, {"drain": True, "epoch": epoch, "cordon": True})
    await kv.delete(TARGET.record_key)
    await register(kv)
    assert await wait_drained(kv, TARGET, epoch, 1.0, lambda info: None) is DrainEnd.DIED
    assert await control(kv) == {"cordon": True}


async def test_a_drain_that_takes_too_long_is_said_to(kv: FakeKV) -> None:
    epoch = await register(kv, status=ReplicaStatus.DRAINING)
    assert await wait_drained(kv, TARGET, epoch, 0.15, lambda info: None) is DrainEnd.TIMED_OUT
