"""What a pool keeps and does while many wait: nothing that grows with those who have left, or that helps nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress

from hub.pool.entry import Binding
from hub.pool.stage_pool import PoolOptions, StagePool
from hub.pool.wait_queue import PriorityQueue, Waiter
from omni_discovery.balancing.base import Task
from omni_discovery.balancing.policies import LeastLoadBalancer
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
        pool.core.upsert(info(number), pool.now())
        pool.core.session_up(f"tcp://h:{number}", pool.now(), uses_credits=True)
        pool.core.grant(f"tcp://h:{number}", credits_)
    return pool


def test_who_left_a_line_that_is_never_served_is_forgotten() -> None:
    line: PriorityQueue[None] = PriorityQueue()
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
    pool.core.grant("tcp://h:0", 1)
    pick = pool.core.pick

    def count(
        request_id: str,
        task: Task,
        affinity_request_id: str | None = None,
        avoid: Collection[str] = (),
        *,
        may_wait: bool = False,
    ) -> Binding | None:
        nonlocal tried
        tried += 1
        return pick(request_id, task, affinity_request_id, avoid, may_wait=may_wait)

    pool.core.pick = count  # type: ignore[method-assign]
    picks = [asyncio.create_task(pool.pick(str(number), {}, avoid={"tcp://h:0"})) for number in range(10)]
    await asyncio.sleep(0)
    pool.core.report("tcp://h:0", 1, pool.now())
    before = tried
    for _ in range(5):
        pool.core.report("tcp://h:0", 1, pool.now())
        pool.core.grant("tcp://h:0", 1)
    assert tried == before
    pool.core.grant("tcp://h:1", 1)
    assert (await picks[0]).replica_id == 1
    assert len(pool.core.queue) == 9
    for pick in picks[1:]:
        pick.cancel()
        with suppress(asyncio.CancelledError):
            await pick


def test_a_pool_where_nobody_waits_does_not_look_for_whom_to_ask() -> None:
    pool, asked = pool_of(20, credits_=1), 0
    credit_replicas = pool.core.credit_replicas

    def count(*, with_ejected: bool = False) -> tuple[str, ...]:
        nonlocal asked
        asked += 1
        return credit_replicas(with_ejected=with_ejected)

    pool.core.credit_replicas = count  # type: ignore[method-assign]
    for _ in range(3):
        pool.core.failed("tcp://h:5", pool.now())
    assert len(pool.core.outliers) == 1
    assert pool.core.credit_requests(100.0) == []
    assert pool.core.next_credit_request_s is None
    assert asked == 0
