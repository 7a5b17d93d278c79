"""StagePool: affinity first, then the balancer, else a bounded wait."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from hub.stage_pool import PoolOptions, StagePool
from omni_discovery.balancers import LoadBalancer, build_load_balancer_factory
from omni_discovery.errors import StageUnavailableError
from omni_discovery.messages import ReplicaInfo, ReplicaStatus


class First(LoadBalancer):
    """Always the first, and remembers what it was shown."""

    def __init__(self) -> None:
        self.shown: list[list[ReplicaInfo]] = []

    def select(self, task: Any, replicas: list[ReplicaInfo]) -> int:
        self.shown.append(list(replicas))
        return 0


def info(name: str, queue_length: int = 0) -> ReplicaInfo:
    return ReplicaInfo(f"tcp://{name}:1", f"tcp://{name}:2", 3, ReplicaStatus.UP, queue_length, 0.0, 0.0)


def pool_with(*names: str, balancer: LoadBalancer | None = None, timeout_s: float = 0.05) -> StagePool:
    pool = StagePool(3, balancer or First(), PoolOptions(pick_timeout_s=timeout_s))
    for name in names:
        pool.upsert(info(name))
        pool.session_up(f"tcp://{name}:1")
    return pool


TASK: Any = {"request_id": "r", "engine_inputs": None, "sampling_params": None}


async def test_an_empty_stage_is_waited_for_and_then_named() -> None:
    """Statement 53."""
    pool = pool_with(timeout_s=0.1)
    begun_s = time.monotonic()
    with pytest.raises(StageUnavailableError, match=r"^no UP replica for stage 3 after 0\.1s$") as caught:
        await pool.pick("r", TASK)
    assert 0.09 <= time.monotonic() - begun_s < 1.0
    assert caught.value.stage_id == 3


def test_ten_seconds_is_what_a_pick_waits_when_nobody_says_otherwise() -> None:
    assert StagePool(0, First()).pick_timeout_s == 10.0


async def test_a_replica_that_comes_up_ends_the_wait_of_all() -> None:
    pool = pool_with(timeout_s=5.0)
    picks = [asyncio.create_task(pool.pick(f"r{number}", TASK)) for number in range(3)]
    await asyncio.sleep(0)
    pool.upsert(info("a"))
    await asyncio.sleep(0)
    assert not any(pick.done() for pick in picks)
    pool.session_up("tcp://a:1")
    assert {(await pick).input_addr for pick in picks} == {"tcp://a:1"}
    assert pool.in_flight("tcp://a:1") == ["r0", "r1", "r2"]


async def test_two_picks_of_one_request_give_the_same_replica() -> None:
    """Statement 56."""
    pool = pool_with("a", "b", balancer=build_load_balancer_factory("round-robin")())
    first = await pool.pick("r", TASK)
    assert {(await pool.pick("r", TASK)).input_addr for _ in range(5)} == {first.input_addr}


async def test_when_the_bound_replica_is_gone_the_next_pick_binds_to_another() -> None:
    """Statement 57."""
    pool = pool_with("a", "b")
    pool.bind("r", "tcp://b:1")
    pool.remove("tcp://b:1")
    assert (await pool.pick("r", TASK)).input_addr == "tcp://a:1"
    assert pool.bound("r") == "tcp://a:1"


async def test_a_companion_goes_where_its_parent_is_while_that_is_serviceable() -> None:
    """Statement 58."""
    pool = pool_with("a", "b")
    pool.bind("parent", "tcp://b:1")
    assert (await pool.pick("child", TASK, "parent")).input_addr == "tcp://b:1"
    pool.session_down("tcp://b:1")
    assert (await pool.pick("other child", TASK, "parent")).input_addr == "tcp://a:1"


async def test_the_balancer_sees_the_load_of_now() -> None:
    balancer = First()
    pool = pool_with("a", "b", balancer=balancer)
    pool.bind("r1", "tcp://a:1")
    pool.report("tcp://b:1", 4)
    await pool.pick("r2", TASK)
    assert [each.queue_length for each in balancer.shown[-1]] == [1, 4]


async def test_a_replica_to_avoid_is_passed_over() -> None:
    pool = pool_with("a", "b")
    assert (await pool.pick("r", TASK, avoid={"tcp://a:1"})).input_addr == "tcp://b:1"


async def test_no_time_is_lost_waiting_where_all_that_serve_have_failed_the_request() -> None:
    pool = pool_with("a", timeout_s=30.0)
    with pytest.raises(StageUnavailableError, match="failed this request"):
        await pool.pick("r", TASK, avoid={"tcp://a:1"})


async def test_a_cancelled_pick_leaves_no_binding_and_no_waiter() -> None:
    pool = pool_with(timeout_s=30.0)
    pick = asyncio.create_task(pool.pick("r", TASK))
    await asyncio.sleep(0)
    pick.cancel()
    await asyncio.gather(pick, return_exceptions=True)
    pool.upsert(info("a"))
    pool.session_up("tcp://a:1")
    assert pool.bound("r") is None
    assert pool.waiting_count == 0


def test_release_and_invalidate_are_plain_calls() -> None:
    pool = pool_with("a")
    pool.bind("r1", "tcp://a:1")
    pool.bind("r2", "tcp://a:1")
    assert pool.release("r1") == "tcp://a:1"
    assert pool.release("r1") is None
    assert pool.invalidate_addr("tcp://a:1") == ["r2"]
