"""A zone or a weight is not left because idle hubs hold the credits: those are asked for first, for a short moment."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from hub.pool.members import Members
from hub.pool.stage_pool import PoolOptions, StagePool
from omni_discovery.balancing.policies import LeastLoadBalancer
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from tests.support.pools import accept
from tests.support.quiet import soon_s

TASK: Any = {"request_id": "r"}


def info(name: str, replica_id: int, **more: Any) -> ReplicaInfo:
    return ReplicaInfo(name, name + "/out", 0, ReplicaStatus.UP, 0, 0.0, 0.0, replica_id, capacity=4, **more)


def pool_of(*infos: ReplicaInfo, credits_: int, **options: Any) -> StagePool:
    pool = StagePool(0, LeastLoadBalancer(), PoolOptions(**options))
    pool.core.set_live_hubs(3)
    for each in infos:
        pool.core.upsert(each, pool.now())
        pool.core.session_up(each.input_addr, pool.now(), uses_credits=True)
        pool.core.grant(each.input_addr, credits_)
    return pool


def zones(credits_: int = 2) -> StagePool:
    far, near = info("far", 0, labels={"zone": "b"}), info("near", 1, labels={"zone": "a"})
    return pool_of(far, near, credits_=credits_, labels={"zone": "a"})


async def start(pool: StagePool, count: int) -> list[asyncio.Task[ReplicaInfo]]:
    picks = [asyncio.create_task(pool.pick(f"r{number}", TASK)) for number in range(count)]
    await asyncio.sleep(0)
    return picks


async def where(picks: list[asyncio.Task[ReplicaInfo]]) -> list[str]:
    return sorted([(await pick).input_addr for pick in picks])


async def test_requests_stay_in_the_zone_whose_credits_idle_hubs_give_back() -> None:
    """1. two replicas with four slots; this hub holds two credits of each, idle hubs the others
    2. four requests come at once: the two beyond its credits ask the near replica, and nobody else, for two more
    3. the idle hubs give theirs back: all four are near
    """
    pool = zones()
    picks = await start(pool, 4)
    assert len(pool.core.queue) == 2
    wants = pool.core.credit_requests(time.monotonic())
    assert [(want.addr, want.waiting) for want in wants] == [("near", 2)]
    pool.core.grant("near", 2)
    assert await where(picks) == ["near"] * 4
    assert [(want.addr, want.waiting) for want in pool.core.credit_requests(time.monotonic())] == [("near", 0)]


async def test_a_zone_that_gives_no_credit_in_a_moment_is_left() -> None:
    pool = zones()
    begun_s = time.monotonic()
    assert await where(await start(pool, 4)) == ["far", "far", "near", "near"]
    assert 0.09 <= time.monotonic() - begun_s < soon_s(2.0)


async def test_those_for_whom_the_zone_has_no_room_leave_it_at_once() -> None:
    """Six requests, four slots in the zone, of which this hub holds two: two leave, and two wait for the zone."""
    pool = zones()
    picks = await start(pool, 6)
    assert len(pool.core.queue) == 2
    assert [(want.addr, want.waiting) for want in pool.core.credit_requests(time.monotonic())] == [("near", 2)]
    pool.core.grant("near", 2)
    assert await where(picks) == ["far"] * 2 + ["near"] * 4


async def test_a_zone_that_is_full_is_left_at_once() -> None:
    """The replica's own report says that its slots are taken: nothing is to be had there, and nobody waits for it."""
    pool = zones(credits_=0)
    pool.core.grant("far", 2)
    pool.core.report("near", 4, pool.now())
    assert pool.core.try_pick("r", TASK) is not None
    assert pool.core.bound("r") == "far"


async def test_a_request_that_must_avoid_the_zone_does_not_wait_for_it() -> None:
    pool = zones(credits_=0)
    pool.core.grant("far", 1)
    found = pool.core.try_pick("r", TASK, avoid={"near"})
    assert found is not None
    assert found.addr == "far"


async def test_the_heavier_replica_gets_its_share_though_idle_hubs_hold_its_credits() -> None:
    """1. weights 2 and 0.25, four slots each, of which this hub holds two; 2. five requests: four to the heavier."""
    pool = pool_of(info("heavy", 0, weight=2.0), info("light", 1, weight=0.25), credits_=2)
    picks = await start(pool, 5)
    assert [want.addr for want in pool.core.credit_requests(time.monotonic())] == ["heavy"]
    for request_id in pool.core.members.in_flight("heavy"):
        accept(pool.core, request_id)
    pool.core.report("heavy", 2, pool.now())
    pool.core.grant("heavy", 2)
    assert await where(picks) == ["heavy"] * 4 + ["light"]


async def test_without_zones_and_weights_a_slot_that_is_there_is_taken() -> None:
    pool = pool_of(info("a", 0), info("b", 1), credits_=0)
    pool.core.grant("a", 3)
    assert await where(await start(pool, 3)) == ["a"] * 3


def test_members_tell_what_they_know_of_an_address_and_whether_a_recount_changed_anything() -> None:
    members = Members(PoolOptions())
    unknown = members.get("a"), members.answers("a"), members.serviceable("a"), members.credits("a")
    assert unknown == (None, False, False, 0)
    assert members.report_age_s("a", 5.0) is None
    entry = members.upsert(info("a", 0), 1.0)
    assert [members.recount(entry, 1.0) for _ in range(2)] == [True, False]
    assert (members.listed_count, members.pickable_count, members.slots) == (1, 0, 0)
    entry.answers = True
    assert [members.recount(entry, 2.0) for _ in range(2)] == [True, False]
    assert (members.pickable_count, members.slots, members.serviceable("a")) == (1, 4, True)
    entry.reported_at_s = 2.0
    assert members.report_age_s("a", 5.0) == 3.0
