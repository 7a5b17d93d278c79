"""What a pool keeps and does while many wait: nothing that grows with those who have left, or that helps nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress

from hub.pool.stage_pool import PoolOptions, StagePool
from hub.pool.wait_queue import Waiter, WaitingLine
from omni_discovery.balancing.policies import LeastLoadBalancer, Task
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus


def info(number: int) -> ReplicaInfo:
    return ReplicaInfo(
        input_addr=f"tcp://h:{number}",
        output_addr=f"tcp://h:{number + 20000}",
        stage_id=0,
        status=ReplicaStatus.UP,
        queue_length=0,
        last_heartbeat=0.0,
        registered_at=0.0,
        replica_id=number,
        epoch=number + 1,
        capacity=4,
    )


def pool_of(count: int, *, credits_: int = 0) -> StagePool:
    pool = StagePool(0, LeastLoadBalancer(), PoolOptions())
    for number in range(count):
        pool.upsert(info(number))
        pool.session_up(f"tcp://h:{number}", gated=True)
        pool.grant(f"tcp://h:{number}", credits_)
    return pool


def test_who_left_a_line_that_is_never_served_is_forgotten() -> None:
    line: WaitingLine[None] = WaitingLine()
    for number in range(1000):
        waiter: Waiter[None] = Waiter(str(number), {}, None, (), 0, float(number), None)
        line.add(waiter)
        assert line.oldest_wait_s(float(number)) == 0.0
        line.discard(waiter)
        line.oldest_wait_s(float(number))
    assert len(line._heap) <= 65


async def test_those_whom_a_free_slot_is_no_good_for_are_not_tried_again_and_again() -> None:
    """1. ten wait who avoid the only replica with free slots
    2. its reports and more credits for it try nobody
    3. another frees a slot: one of the ten is served, and nine wait on
    """
    pool, tried = pool_of(3), 0
    pool.grant("tcp://h:0", 1)
    pick_waited = pool._core.pick_waited

    def count(
        request_id: str, task: Task, affinity_request_id: str | None, avoid: Collection[str], *, patient: bool
    ) -> ReplicaInfo | None:
        nonlocal tried
        tried += 1
        return pick_waited(request_id, task, affinity_request_id, avoid, patient=patient)

    pool._core.pick_waited = count  # type: ignore[method-assign]
    picks = [asyncio.create_task(pool.pick(str(number), {}, avoid={"tcp://h:0"})) for number in range(10)]
    await asyncio.sleep(0)
    pool.report("tcp://h:0", 1)
    before = tried
    for _ in range(5):
        pool.report("tcp://h:0", 1)
        pool.grant("tcp://h:0", 1)
    assert tried == before
    pool.grant("tcp://h:1", 1)
    assert (await picks[0]).replica_id == 1
    assert pool.waiting_count == 9
    for pick in picks[1:]:
        pick.cancel()
        with suppress(asyncio.CancelledError):
            await pick


def test_a_pool_where_nobody_waits_does_not_look_for_whom_to_ask() -> None:
    pool, asked = pool_of(20, credits_=1), 0
    givers = pool._core.givers

    def count() -> tuple[str, ...]:
        nonlocal asked
        asked += 1
        return givers()

    pool._core.givers = count  # type: ignore[method-assign]
    for _ in range(3):
        pool.failed("tcp://h:5")
    assert pool.ejected_count == 1
    assert pool.wants(100.0) == []
    assert pool.next_wants_s is None
    assert asked == 0
