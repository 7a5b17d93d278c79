"""StagePool: affinity first, then the balancer, else a bounded wait."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from hub.pool.entry import BindingEnd
from hub.pool.stage_pool import PoolOptions, StagePool
from omni_discovery.balancing.base import LoadBalancer
from omni_discovery.balancing.policies import build_load_balancer_factory
from omni_discovery.errors import ConfigError, EngineFailedError, StageUnavailableError
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from tests.support.pools import accept, spent_credit
from tests.support.quiet import soon_s


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
        pool.core.upsert(info(name), pool.now())
        pool.core.session_up(f"tcp://{name}:1", pool.now())
    return pool


TASK: Any = {"request_id": "r", "engine_inputs": None, "sampling_params": None}


async def test_an_empty_stage_is_waited_for_and_then_named() -> None:
    """Statement 53, also where 67 and 80 would fail the request at once."""
    pool = pool_with(timeout_s=0.1)
    begun_s = time.monotonic()
    text = r"^no UP replica for stage 3 after 0\.1s \(none is registered\)$"
    with pytest.raises(StageUnavailableError, match=text) as caught:
        await pool.pick("r", TASK)
    assert 0.09 <= time.monotonic() - begun_s < soon_s(1.0)
    assert caught.value.stage_id == 3


def test_ten_seconds_is_what_a_pick_waits_when_nobody_says_otherwise() -> None:
    assert StagePool(0, First()).pick_timeout_s == 10.0


async def test_a_replica_that_comes_up_ends_the_wait_of_all() -> None:
    pool = pool_with(timeout_s=5.0)
    picks = [asyncio.create_task(pool.pick(f"r{number}", TASK)) for number in range(3)]
    await asyncio.sleep(0)
    pool.core.upsert(info("a"), pool.now())
    await asyncio.sleep(0)
    assert not any(pick.done() for pick in picks)
    pool.core.session_up("tcp://a:1", pool.now())
    assert {(await pick).input_addr for pick in picks} == {"tcp://a:1"}
    assert pool.core.members.in_flight("tcp://a:1") == ["r0", "r1", "r2"]


async def test_two_picks_of_one_request_give_the_same_replica() -> None:
    """Statement 56."""
    pool = pool_with("a", "b", balancer=build_load_balancer_factory("round-robin")())
    first = await pool.pick("r", TASK)
    assert {(await pool.pick("r", TASK)).input_addr for _ in range(5)} == {first.input_addr}


async def test_when_the_bound_replica_is_gone_the_next_pick_binds_to_another() -> None:
    """Statement 57."""
    pool = pool_with("a", "b")
    pool.bind("r", "tcp://b:1")
    pool.core.remove("tcp://b:1", pool.now())
    assert (await pool.pick("r", TASK)).input_addr == "tcp://a:1"
    assert pool.core.bound("r") == "tcp://a:1"


async def test_a_companion_goes_where_its_parent_is_while_that_is_serviceable() -> None:
    """Statement 58."""
    pool = pool_with("a", "b")
    pool.bind("parent", "tcp://b:1")
    assert (await pool.pick("child", TASK, "parent")).input_addr == "tcp://b:1"
    pool.core.session_down("tcp://b:1", pool.now())
    assert (await pool.pick("other child", TASK, "parent")).input_addr == "tcp://a:1"


async def test_the_balancer_sees_the_load_of_now() -> None:
    balancer = First()
    pool = pool_with("a", "b", balancer=balancer)
    pool.bind("r1", "tcp://a:1")
    pool.core.report("tcp://b:1", 4, pool.now())
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
    pool.core.upsert(info("a"), pool.now())
    pool.core.session_up("tcp://a:1", pool.now())
    assert pool.core.bound("r") is None
    assert len(pool.core.queue) == 0


def test_release_and_invalidate_are_plain_calls() -> None:
    pool = pool_with("a")
    pool.bind("r1", "tcp://a:1")
    pool.bind("r2", "tcp://a:1")
    assert pool.release("r1") == "tcp://a:1"
    assert pool.release("r1") is None
    assert pool.invalidate_addr("tcp://a:1") == ["r2"]


# ---- late binding


def full_pool(*names: str, timeout_s: float = 30.0) -> StagePool:
    """Every replica answers, and none has granted anything."""
    pool = StagePool(3, build_load_balancer_factory("least-load")(), PoolOptions(pick_timeout_s=timeout_s))
    for name in names:
        pool.core.upsert(info(name), pool.now())
        pool.core.session_up(f"tcp://{name}:1", pool.now(), uses_credits=True)
    return pool


async def waiting(pool: StagePool, *request_ids: str, **more: Any) -> list[asyncio.Task[ReplicaInfo]]:
    picks = [asyncio.create_task(pool.pick(request_id, TASK, **more)) for request_id in request_ids]
    await asyncio.sleep(0)
    return picks


def bound(pool: StagePool, *request_ids: str) -> str:
    """Which of the requests have a replica."""
    return "".join(request_id for request_id in request_ids if pool.core.bound(request_id) is not None)


async def stop(picks: list[asyncio.Task[ReplicaInfo]]) -> None:
    for pick in picks:
        pick.cancel()
    await asyncio.gather(*picks, return_exceptions=True)


async def test_as_many_are_served_as_there_are_slots_in_the_order_of_priority_and_arrival() -> None:
    """1. c (5), a (0), d (5), b (0) wait
    2. one slot: a is bound at once, nobody else
    3. two slots at another replica: b, then c
    4. e comes while d waits: the next slot is for d
    """
    pool = full_pool("x", "y")
    picks = await waiting(pool, "c", priority=5)
    picks += await waiting(pool, "a")
    picks += await waiting(pool, "d", priority=5)
    picks += await waiting(pool, "b")
    assert len(pool.core.queue) == 4
    pool.core.grant("tcp://x:1", 1)
    assert bound(pool, *"abcd") == "a"
    assert spent_credit(pool.core, "a")
    pool.core.grant("tcp://y:1", 2)
    assert bound(pool, *"abcd") == "abc"
    picks += await waiting(pool, "e", priority=5)
    pool.core.grant("tcp://x:1", 1)
    assert bound(pool, *"abcde") == "abcd"
    assert len(pool.core.queue) == 1
    await asyncio.sleep(0)
    assert [pick.done() for pick in picks] == [True, True, True, True, False]
    await stop(picks)
    assert len(pool.core.queue) == 0


async def test_a_stage_whose_replicas_are_all_full_is_waited_for_longer_than_one_without_any() -> None:
    """1. everybody is full for three times the pick timeout: the request waits
    2. the last one goes: a pick timeout later it fails, and not before
    """
    pool = full_pool("x", timeout_s=0.1)
    picks = await waiting(pool, "r")
    await asyncio.sleep(0.3)
    assert not picks[0].done()
    pool.core.session_down("tcp://x:1", pool.now())
    gone_at_s = time.monotonic()
    with pytest.raises(StageUnavailableError, match=r"no UP replica for stage 3 after 0\.1s"):
        await picks[0]
    assert 0.09 <= time.monotonic() - gone_at_s < soon_s(1.0)


async def test_the_time_without_anybody_begins_anew_when_somebody_was_there() -> None:
    pool = full_pool("x", timeout_s=0.2)
    pool.core.session_down("tcp://x:1", pool.now())
    picks = await waiting(pool, "r")
    await asyncio.sleep(0.15)
    pool.core.session_up("tcp://x:1", pool.now(), uses_credits=True)
    pool.core.session_down("tcp://x:1", pool.now())
    await asyncio.sleep(0.1)
    assert not picks[0].done()
    with pytest.raises(StageUnavailableError):
        await picks[0]


async def test_who_can_not_use_the_free_slot_lets_others_have_it() -> None:
    pool = full_pool("x", "y")
    picks = await waiting(pool, "choosy", avoid={"tcp://x:1"})
    picks += await waiting(pool, "r")
    pool.core.grant("tcp://x:1", 2)
    assert bound(pool, "choosy", "r") == "r"
    assert pool.core.try_pick("s", TASK) is not None
    pool.core.grant("tcp://y:1", 1)
    assert pool.core.bound("choosy") == "tcp://y:1"
    await asyncio.gather(*picks)


async def test_a_waiter_whose_last_other_replica_goes_is_told_at_once() -> None:
    pool = full_pool("x", "y")
    picks = await waiting(pool, "choosy", avoid={"tcp://x:1"})
    pool.core.remove("tcp://y:1", pool.now())
    with pytest.raises(StageUnavailableError, match="failed this request"):
        await picks[0]


async def test_a_pick_cancelled_when_it_was_just_served_gives_its_slot_to_the_next() -> None:
    pool = full_pool("x")
    picks = await waiting(pool, "r0", "r1")
    pool.core.grant("tcp://x:1", 1)
    assert pool.core.bound("r0") == "tcp://x:1"
    picks[0].cancel()
    assert (await picks[1]).input_addr == "tcp://x:1"
    assert pool.core.bound("r0") is None
    assert spent_credit(pool.core, "r1")
    assert picks[0].cancelled()


async def test_a_cancelled_pick_leaves_the_binding_alone_that_came_after_it() -> None:
    """1. r waits, is served, cancelled and taken back, all before its task runs
    2. and picked for again at once: that binding stays
    """
    pool = full_pool("x", "y")
    picks = await waiting(pool, "r")
    pool.core.grant("tcp://x:1", 1)
    picks[0].cancel()
    assert pool.core.release("r", BindingEnd.UNSENT) == "tcp://x:1"
    found = pool.core.try_pick("r", TASK)
    await asyncio.gather(*picks, return_exceptions=True)
    assert found is not None
    assert pool.core.bound("r") == found.addr
    assert spent_credit(pool.core, "r")


async def test_a_request_that_could_not_be_sent_frees_its_slot_for_who_waits() -> None:
    """Statement 68: it leaves no binding."""
    pool = full_pool("x")
    pool.core.grant("tcp://x:1", 1)
    assert pool.core.try_pick("r0", TASK) is not None
    picks = await waiting(pool, "r1")
    assert pool.core.release("r0", BindingEnd.UNSENT) == "tcp://x:1"
    assert (await picks[0]).input_addr == "tcp://x:1"


async def test_a_policy_that_fails_fails_the_waiter_and_not_who_freed_the_slot() -> None:
    class Broken(LoadBalancer):
        def select(self, task: Any, replicas: list[ReplicaInfo]) -> int:
            raise ZeroDivisionError

    pool = StagePool(3, Broken(), PoolOptions())
    picks = await waiting(pool, "r0", "r1")
    pool.core.upsert(info("x"), pool.now())
    pool.core.session_up("tcp://x:1", pool.now())
    assert [type(each) for each in await asyncio.gather(*picks, return_exceptions=True)] == [ZeroDivisionError] * 2
    assert len(pool.core.queue) == 0


async def test_who_waits_is_served_when_an_ejection_ends() -> None:
    now_s = 100.0
    pool = StagePool(3, First(), PoolOptions(), now=lambda: now_s)
    for name in "xyz":
        pool.core.upsert(info(name), pool.now())
        pool.core.session_up(f"tcp://{name}:1", pool.now(), uses_credits=True)
    for _ in range(3):
        pool.core.failed("tcp://x:1", pool.now())
    pool.core.grant("tcp://x:1", 1)
    picks = await waiting(pool, "r")
    assert not picks[0].done()
    assert len(pool.core.outliers) == 1
    assert pool.core.next_timer_s == 101.0
    pool.core.run_timers(101.0)
    assert (await picks[0]).input_addr == "tcp://x:1"


def with_x_ejected(*names: str) -> StagePool:
    """``full_pool``, and x has failed too often."""
    pool = full_pool(*names)
    for _ in range(3):
        pool.core.failed("tcp://x:1", pool.now())
    assert len(pool.core.outliers) == 1
    return pool


async def test_who_has_nobody_left_but_an_ejected_one_asks_that_for_a_slot_and_gets_it() -> None:
    """1. y has failed r, x is ejected and grants what it is asked for only: r does not wait for the ejection's end
    2. s, which avoids nobody, is not served by x
    """
    pool = with_x_ejected("x", "y")
    picks = await waiting(pool, "r", avoid={"tcp://y:1"})
    picks += await waiting(pool, "s")
    assert "tcp://x:1" in {want.addr for want in pool.core.credit_requests(time.monotonic())}
    pool.core.grant("tcp://x:1", 2)
    assert bound(pool, "r", "s") == "r"
    assert (await picks[0]).input_addr == "tcp://x:1"
    assert len(pool.core.queue) == 1
    await stop(picks)


async def test_who_waits_for_the_last_good_one_goes_to_the_ejected_one_when_that_dies() -> None:
    """1. x is ejected with slots to spend, y has failed r, z is full: r waits for z
    2. z dies: r gets x at once, although nobody new has a free slot
    """
    pool = with_x_ejected("x", "y", "z", "other")
    pool.core.grant("tcp://x:1", 1)
    avoid = {"tcp://y:1", "tcp://other:1"}
    picks = await waiting(pool, "r", avoid=avoid)
    assert bound(pool, "r") == ""
    pool.core.session_down("tcp://z:1", pool.now())
    assert len(pool.core.outliers) == 1
    assert pool.core.bound("r") == "tcp://x:1"
    await asyncio.gather(*picks)


async def test_an_ejected_one_whose_slot_comes_back_serves_who_has_nobody_else() -> None:
    """1. q got the last slot of x, the only one that has not failed r; 2. q could not be sent: r has it."""
    pool = with_x_ejected("x", "y")
    pool.core.grant("tcp://x:1", 1)
    assert pool.core.try_pick("q", TASK, avoid={"tcp://y:1"}) is not None
    picks = await waiting(pool, "r", avoid={"tcp://y:1"})
    assert pool.core.release("q", BindingEnd.UNSENT) == "tcp://x:1"
    assert pool.core.bound("r") == "tcp://x:1"
    await asyncio.gather(*picks)


async def test_a_replica_whose_send_queue_is_full_gets_nothing_for_a_moment_and_is_not_to_blame() -> None:
    """1. nothing goes to x: y is picked; both: who comes then waits, and is told when to look again
    2. the moment is over: x serves it
    """
    now_s = 100.0
    pool = StagePool(3, First(), PoolOptions(), now=lambda: now_s)
    for name in "xy":
        pool.core.upsert(info(name), pool.now())
        pool.core.session_up(f"tcp://{name}:1", pool.now())
    pool.core.send_queue_full("tcp://x:1", pool.now())
    found = pool.core.try_pick("a", TASK)
    assert found is not None
    assert found.addr == "tcp://y:1"
    assert not pool.core.has_free({"tcp://y:1"})
    pool.core.send_queue_full("tcp://y:1", pool.now())
    picks = await waiting(pool, "r")
    assert pool.core.next_timer_s is not None
    assert 100.0 < pool.core.next_timer_s <= 100.1
    pool.core.run_timers(pool.core.next_timer_s)
    assert (await picks[0]).input_addr == "tcp://x:1"
    assert (len(pool.core.outliers), pool.core.members.pickable_count) == (0, 2)
    assert pool.core.next_timer_s is None


async def test_ten_thousand_waiters_and_as_many_slots_take_no_longer_than_they_must() -> None:
    """No herd: a slot looks at whom it serves, not at all who wait."""
    pool = full_pool("x")
    loop = asyncio.get_running_loop()
    picks = await waiting(pool, *(f"r{number}" for number in range(10_000)))
    began_s = loop.time()
    for _ in range(10_000):
        pool.core.grant("tcp://x:1", 1)
    assert time.monotonic() - began_s < soon_s(2.0)
    assert len(pool.core.queue) == 0
    assert pool.core.members.in_flight("tcp://x:1") == [f"r{number}" for number in range(10_000)]
    await asyncio.gather(*picks)


# ---- asking for credits


async def test_credits_are_asked_for_while_somebody_waits_and_not_more_often_than_each_50_ms() -> None:
    pool = full_pool("x", "y")
    assert pool.core.next_credit_request_s is None
    assert pool.core.credit_requests(0.0) == []
    picks = await waiting(pool, *"abc")
    now_s = time.monotonic()
    assert pool.core.next_credit_request_s == 0.0
    wants = pool.core.credit_requests(now_s)
    assert [(want.addr, want.waiting) for want in wants] == [("tcp://x:1", 2), ("tcp://y:1", 2)]
    assert all(0 <= want.oldest_wait_s < 1.0 for want in wants)
    assert pool.core.next_credit_request_s == now_s + 0.05
    assert pool.core.credit_requests(now_s + 0.04) == []
    pool.core.grant("tcp://x:1", 2)
    later = pool.core.credit_requests(now_s + 1.0)
    assert [want.waiting for want in later] == [1, 1]
    assert later[0].oldest_wait_s > 0.9
    pool.core.grant("tcp://x:1", 1)
    assert pool.core.next_credit_request_s == 0.0
    assert {(want.addr, want.waiting) for want in pool.core.credit_requests(now_s + 1.01)} == {
        ("tcp://x:1", 0),
        ("tcp://y:1", 0),
    }
    assert pool.core.next_credit_request_s is None
    picks += await waiting(pool, "d")
    assert [want.waiting for want in pool.core.credit_requests(now_s + 1.02)] == [1, 1]
    await stop(picks)


async def test_no_more_than_16_are_asked_at_a_time_and_all_in_turn() -> None:
    pool = full_pool(*(f"h{number}" for number in range(40)))
    pool.core.upsert(info("ungated"), pool.now())
    pool.core.session_up("tcp://ungated:1", pool.now())
    pool.core.session_down("tcp://ungated:1", pool.now())
    picks = await waiting(pool, "r")
    asked: set[str] = set()
    now: set[str] = set()
    for turn in range(3):
        wants = pool.core.credit_requests(1000.0 + turn)
        assert len(wants) <= 32
        now -= {want.addr for want in wants if not want.waiting}
        now |= {want.addr for want in wants if want.waiting}
        assert len(now) == 16
        asked |= now
    assert asked == {f"tcp://h{number}:1" for number in range(40)}
    await stop(picks)
    assert {want.addr for want in pool.core.credit_requests(1004.0)} == now


async def test_where_nobody_gives_credits_nobody_is_asked() -> None:
    pool = pool_with(timeout_s=30.0)
    picks = await waiting(pool, "r")
    assert pool.core.next_credit_request_s is None
    assert pool.core.credit_requests(0.0) == []
    await stop(picks)


# ---- the seeds' statements that the pool answers for


def test_statement_54_unavailable_is_a_runtime_error_and_no_dead_engine() -> None:
    assert issubclass(StageUnavailableError, RuntimeError)
    assert not issubclass(StageUnavailableError, EngineFailedError)


def test_statement_59_a_choice_without_waiting_is_none_or_honoured_by_the_pick_that_follows() -> None:
    pool = pool_with("a", "b", balancer=build_load_balancer_factory("random")())
    found = pool.core.try_pick("r", TASK)
    assert found is not None
    assert asyncio.run(pool.pick("r", TASK)) == found.info
    assert pool_with().core.try_pick("r", TASK) is None


def test_statement_60_and_61_bindings_end_by_address_or_request() -> None:
    pool = pool_with("a", "b")
    pool.bind("r1", "tcp://a:1")
    pool.bind("r2", "tcp://b:1")
    assert pool.invalidate_addr("tcp://a:1") == ["r1"]
    assert pool.invalidate_addr("tcp://nobody:1") == []
    assert pool.release("r2") == "tcp://b:1"
    assert pool.release("unknown") is None


def test_statement_63_a_record_again_keeps_its_entry_and_its_work() -> None:
    """And statement 71: one address is one entry, however often it is listed."""
    pool = pool_with("a")
    pool.bind("r", "tcp://a:1")
    pool.core.upsert(info("a", queue_length=3), pool.now())
    assert pool.core.members.registered_count == 1
    assert pool.core.members.in_flight("tcp://a:1") == ["r"]


def test_statement_64_to_66_one_that_goes_changes_nothing_for_the_others() -> None:
    pool = pool_with("a", "b", "c", balancer=build_load_balancer_factory("round-robin")())
    pool.bind("r", "tcp://c:1")
    pool.core.remove("tcp://b:1", pool.now())
    pool.core.remove("tcp://b:1", pool.now())
    pool.core.remove("tcp://unknown:1", pool.now())
    assert (pool.core.members.registered_count, pool.core.members.pickable_count) == (2, 2)
    assert pool.core.bound("r") == "tcp://c:1"
    assert {pool.core.try_pick(f"s{each}", TASK).addr for each in range(4)} == {"tcp://a:1", "tcp://c:1"}  # type: ignore[union-attr]


def test_statement_73_and_79_who_is_silent_serves_again_when_it_answers() -> None:
    """Attached and not yet answering it is kept; lost and found again it is picked again, without being rebuilt."""
    pool = StagePool(3, First(), PoolOptions())
    pool.core.upsert(info("a"), pool.now())
    assert (pool.core.members.registered_count, pool.core.members.pickable_count) == (1, 0)
    for _ in range(2):
        pool.core.session_up("tcp://a:1", pool.now())
        assert pool.core.try_pick("r", TASK) is not None
        pool.release("r")
        pool.core.session_down("tcp://a:1", pool.now())
        assert pool.core.try_pick("r", TASK) is None


def test_live_hubs_scale_what_this_hub_has_sent_since_the_last_report() -> None:
    """Of eight reported two are ours; we send two more, and so do the three other hubs, we guess."""
    balancer = First()
    pool = pool_with("a", "b", balancer=balancer)
    pool.core.set_live_hubs(4)
    for number in range(4):
        pool.bind(f"r{number}", "tcp://a:1")
        if number == 1:
            accept(pool.core, "r0")
            accept(pool.core, "r1")
            pool.core.report("tcp://a:1", 8, pool.now())
    pool.bind("s", "tcp://b:1")
    pool.core.try_pick("t", TASK)
    assert [each.queue_length for each in balancer.shown[-1]] == [16, 4]
    pool.core.set_live_hubs(0)
    pool.core.try_pick("u", TASK)
    assert [each.queue_length for each in balancer.shown[-1]] == [11, 1]
    assert pool.core.members.report_age_s("tcp://b:1", pool.now()) is None
    assert (pool.core.members.report_age_s("tcp://a:1", pool.now()) or 0.0) < 1.0


@pytest.mark.parametrize(
    "change",
    [{"pick_timeout_s": 0.0}, {"slow_start_s": -1.0}, {"load_fresh_s": float("nan")}, {"ejection_max_s": 0.5}],
)
def test_options_that_make_no_sense_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        PoolOptions(**change)  # type: ignore[arg-type]
