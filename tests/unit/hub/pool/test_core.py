"""One stage as a hub sees it: who can be picked, and how loaded each replica is by now."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hub.config import PoolOptions
from hub.pool.core import Pool
from hub.pool.entry import Binding, BindingEnd, BindingState
from hub.pool.outliers import OutlierState
from hub.pool.wait_queue import Waiter
from omni_discovery.balancing.base import ListIndex, Member
from omni_discovery.balancing.policies import LeastLoadBalancer, LeastQueueLengthBalancer, RandomBalancer
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from tests.support.pools import accept


def info(name: str = "a", queue_length: int = 0, status: ReplicaStatus = ReplicaStatus.UP) -> ReplicaInfo:
    return ReplicaInfo(f"tcp://{name}:1", f"tcp://{name}:2", 0, status, queue_length, 0.0, 0.0)


def core_with(*names: str) -> Pool:
    core = Pool(0, RandomBalancer(), PoolOptions(slow_start_s=0.0))
    for name in names:
        core.upsert(info(name), 0.0)
        core.session_up(f"tcp://{name}:1", 0.0)
    return core


def addresses(core: Pool, *avoid: str) -> list[str]:
    return [each.input_addr for each in core.candidates(avoid)]


def picked(core: Pool, request_id: str) -> ReplicaInfo | None:
    binding = core.pick(request_id, {})
    return None if binding is None else binding.info


def load(core: Pool, name: str = "a") -> int:
    return next(each.queue_length for each in core.candidates() if each.input_addr == f"tcp://{name}:1")


def test_up_without_a_session_and_a_session_without_up_are_not_picked() -> None:
    """Statement 55."""
    core = core_with("a")
    core.upsert(info("silent"), 0.0)
    core.upsert(info("starting", status=ReplicaStatus.STARTING), 0.0)
    core.session_up("tcp://starting:1", 0.0)
    assert addresses(core) == ["tcp://a:1"]
    assert (core.members.registered_count, core.members.pickable_count) == (3, 1)


@pytest.mark.parametrize("status", [status for status in ReplicaStatus if status is not ReplicaStatus.UP])
def test_only_up_is_picked(status: ReplicaStatus) -> None:
    core = core_with("a")
    core.upsert(info("a", status=status), 1.0)
    assert addresses(core) == []
    core.upsert(info("a"), 2.0)
    assert addresses(core) == ["tcp://a:1"]


@pytest.mark.parametrize("change", [{"cordoned": True}, {"weight": 0.0}])
def test_who_is_cordoned_or_weighs_nothing_is_not_picked_not_even_alone_and_keeps_its_work(
    change: dict[str, Any],
) -> None:
    """1. r1 is bound to a; a is cordoned: no picks, also not where r1 was; r1 stays
    2. the cordon goes: picked again
    """
    core = core_with("a")
    core.bind("r1", "tcp://a:1")
    core.upsert(replace(info("a"), **change), 1.0)
    assert addresses(core) == []
    assert not core.members.serviceable("tcp://a:1")
    assert core.members.pickable_count == 0
    assert core.members.in_flight("tcp://a:1") == ["r1"]
    core.upsert(info("a"), 2.0)
    assert addresses(core) == ["tcp://a:1"]


def test_candidates_keep_the_order_of_registration_and_leave_out_those_to_avoid() -> None:
    core = core_with("b", "a", "c")
    assert addresses(core) == ["tcp://b:1", "tcp://a:1", "tcp://c:1"]
    assert addresses(core, "tcp://a:1") == ["tcp://b:1", "tcp://c:1"]


def test_a_lost_session_stops_picks_and_its_return_brings_them_back() -> None:
    core = core_with("a")
    core.session_down("tcp://a:1", 0.0)
    assert addresses(core) == []
    core.session_up("tcp://a:1", 0.0)
    assert addresses(core) == ["tcp://a:1"]


def test_a_removed_key_stops_picks_but_keeps_the_work_in_flight() -> None:
    """Statement 74, and better: at once.

    1. r1 is bound to a
    2. the key of a is removed: not picked, r1 still bound
    3. r1 ends: nothing is left of a
    """
    core = core_with("a")
    core.bind("r1", "tcp://a:1")
    core.remove("tcp://a:1", 0.0)
    assert addresses(core) == []
    assert core.bound("r1") == "tcp://a:1"
    assert core.members.get("tcp://a:1") is not None
    assert core.release("r1") == "tcp://a:1"
    assert core.members.get("tcp://a:1") is None


def test_a_key_that_comes_back_while_work_is_in_flight_is_picked_again() -> None:
    core = core_with("a")
    core.bind("r1", "tcp://a:1")
    core.remove("tcp://a:1", 0.0)
    core.upsert(info("a"), 1.0)
    assert addresses(core) == ["tcp://a:1"]


def test_own_work_is_counted_once_reported_or_not() -> None:
    """1. a reports 3 requests of others; two of ours are sent: 5
    2. a has accepted one of ours and reports 4: three others, and our two
    3. both of ours are over and a reports 3
    """
    core = core_with()
    core.upsert(info("a", queue_length=3), 0.0)
    core.session_up("tcp://a:1", 0.0)
    core.bind("r1", "tcp://a:1")
    core.bind("r2", "tcp://a:1")
    assert load(core) == 5
    accept(core, "r1")
    core.report("tcp://a:1", 4, 0.1)
    assert load(core) == 5
    core.release("r1")
    core.release("r2")
    core.report("tcp://a:1", 3, 0.2)
    assert load(core) == 3


def test_a_fresh_frame_wins_over_the_records_older_count() -> None:
    core = core_with("a")
    core.report("tcp://a:1", 7, 10.0)
    core.upsert(info("a", queue_length=2), 10.5)
    assert load(core) == 7
    core.upsert(info("a", queue_length=2), 11.5)
    assert load(core) == 2


def test_a_report_below_our_own_part_means_that_nobody_else_is_there() -> None:
    core = core_with("a")
    core.bind("r1", "tcp://a:1")
    accept(core, "r1")
    core.report("tcp://a:1", 0, 0.1)
    assert load(core) == 1


def test_one_whose_reports_have_frozen_gets_no_more_than_its_share_and_all_of_it_when_alone() -> None:
    """Two hubs, ten replicas; one goes on saying that it is idle. Its in-flight work says otherwise."""
    chance, now_s, busy, share = random.Random(1), 0.0, [], Counter[str]()
    names = [f"tcp://{name}:1" for name in "abcdefghij"]
    hubs = [Pool(0, LeastLoadBalancer(), PoolOptions()) for _ in range(2)]
    for hub in hubs:
        hub.set_live_hubs(2)
        for name in "abcdefghij":
            hub.upsert(info(name), 0.0)
            hub.session_up(f"tcp://{name}:1", 0.0)
    for number in range(8000):
        now_s += chance.expovariate(40.0)
        while busy and busy[0][0] <= now_s:
            _, hub, request_id = heappop(busy)
            hubs[hub].release(request_id)
        found = hubs[number % 2].pick(f"r{number}", {})
        assert found is not None
        accept(hubs[number % 2], f"r{number}")
        heappush(busy, (now_s + chance.expovariate(1 / 0.2), number % 2, f"r{number}"))
        share[found.addr] += 1
        for addr in names[1:]:
            total = sum(len(hub.members.in_flight(addr)) for hub in hubs)
            hubs[number % 2].report(addr, total, now_s)
    assert 0 < share["tcp://a:1"] < 1.5 * 8000 / 10
    for addr in names[1:]:
        hubs[0].remove(addr, 0.0)
    assert all(picked(hubs[0], f"s{number}") == info("a") for number in range(50))


def test_the_least_queue_is_the_newest_report_whatever_this_hub_has_sent_since() -> None:
    core = Pool(0, LeastQueueLengthBalancer(), PoolOptions())
    for name, length in {"a": 2, "b": 3}.items():
        core.upsert(info(name, length), 0.0)
        core.session_up(f"tcp://{name}:1", 0.0)
    assert all(picked(core, f"r{number}") == info("a", 2) for number in range(5))
    core.report("tcp://a:1", 4, 1.0)
    assert picked(core, "s") == info("b", 3)
    core.upsert(info("a", 1), 9.0)
    assert picked(core, "t") == info("a", 1)


def test_invalidating_an_address_returns_exactly_the_requests_bound_to_it() -> None:
    """Statement 60."""
    core = core_with("a", "b")
    core.bind("r1", "tcp://a:1")
    core.bind("r2", "tcp://b:1")
    core.bind("r3", "tcp://a:1")
    assert core.invalidate("tcp://a:1") == ["r1", "r3"]
    assert core.bound("r1") is None
    assert core.bound("r2") == "tcp://b:1"
    assert core.invalidate("tcp://a:1") == core.invalidate("tcp://nobody:1") == []


def test_releasing_and_telling_of_what_is_not_there_is_fine() -> None:
    """Statement 61."""
    core = core_with("a")
    assert core.release("nobody") is None
    core.remove("tcp://x:1", 0.0)
    core.session_up("tcp://x:1", 0.0)
    core.session_down("tcp://x:1", 0.0)
    core.report("tcp://x:1", 1, 0.0)
    accept(core, "nobody")


def test_binding_to_nobody_is_refused_and_binding_anew_moves() -> None:
    core = core_with("a", "b")
    with pytest.raises(ValueError, match="no replica"):
        core.bind("r1", "tcp://x:1")
    core.bind("r1", "tcp://a:1")
    core.bind("r1", "tcp://b:1")
    assert core.members.in_flight("tcp://a:1") == []
    assert core.members.in_flight("tcp://b:1") == ["r1"]


class BrokenIndex(ListIndex):
    """A third party's index, one method of which raises while it is named in ``broken``."""

    def __init__(self) -> None:
        super().__init__(LeastLoadBalancer())
        self.broken = ""

    def add(self, member: Member) -> None:
        self._check("add")
        super().add(member)

    def update(self, member: Member) -> None:
        self._check("update")
        super().update(member)

    def remove(self, member: Member) -> None:
        self._check("remove")
        super().remove(member)

    def _check(self, method: str) -> None:
        if method == self.broken:
            raise RuntimeError(f"{method} is broken")


class BrokenBalancer(LeastLoadBalancer):
    def __init__(self) -> None:
        self.made = BrokenIndex()

    def index(self) -> BrokenIndex:
        return self.made


@pytest.mark.parametrize("broken", ["add", "remove"])
def test_an_index_that_raises_leaves_the_count_of_free_replicas_right(broken: str) -> None:
    """1. a goes and comes back, and b stays; one of the two changes of the index raises
    2. the index works again: with the next change the pool has both, or neither
    """
    balancer = BrokenBalancer()
    core, index = Pool(0, balancer, PoolOptions(slow_start_s=0.0)), balancer.made
    for name in "ab":
        core.upsert(info(name), 0.0)
        core.session_up(f"tcp://{name}:1", 0.0)
    if broken == "add":
        core.session_down("tcp://a:1", 1.0)
    index.broken = broken
    with pytest.raises(RuntimeError):
        (core.session_up if broken == "add" else core.session_down)("tcp://a:1", 1.0)
    assert core.free_count == len(core.candidates())
    index.broken = ""
    core.session_up("tcp://a:1", 2.0)
    assert core.free_count == len(core.candidates()) == 2
    for name in "ab":
        core.session_down(f"tcp://{name}:1", 3.0)
    assert core.free_count == len(core.candidates()) == 0
    assert picked(core, "r") is None


def test_an_index_that_raises_in_a_timer_does_not_lose_the_next_deadline() -> None:
    """1. the send queues of a and b are full; 2. a's time is over, and the index raises: b's deadline is announced"""
    balancer = BrokenBalancer()
    core, index = Pool(0, balancer, PoolOptions(slow_start_s=0.0)), balancer.made
    for name in "ab":
        core.upsert(info(name), 0.0)
        core.session_up(f"tcp://{name}:1", 0.0)
    deadlines_s: list[float | None] = []
    core.watch_pool(deadlines_s.append, lambda: None)
    core.send_queue_full("tcp://a:1", 1.0)
    core.send_queue_full("tcp://b:1", 1.02)
    index.broken = "add"
    with pytest.raises(RuntimeError):
        core.run_timers(1.06)
    index.broken = ""
    assert deadlines_s == [None, pytest.approx(1.05), pytest.approx(1.07)]
    core.run_timers(deadlines_s[-1] or 0.0)
    assert core.free_count == 1
    core.report("tcp://a:1", 0, 2.0)
    assert core.free_count == 2


def test_another_number_of_hubs_announces_what_it_makes_due() -> None:
    """1. one pick waits for a credit and it was asked for; another begins to wait, and is due to be asked for in 50 ms
    2. with the loads the pool sees that the heavier replica lacks only a credit: it is due in 5 ms
    """
    core = Pool(0, LeastLoadBalancer(), PoolOptions(slow_start_s=0.0))
    for name, weight in {"heavy": 2.0, "light": 1.0}.items():
        core.upsert(replace(info(name), weight=weight, capacity=4), 0.0)
        core.session_up(f"tcp://{name}:1", 0.0, uses_credits=True)
    deadlines_s: list[float | None] = []
    core.watch_pool(deadlines_s.append, lambda: None)
    for number in range(2):
        token: Future[Binding] = Future()
        core.wait(Waiter(f"r{number}", {}, None, (), 0, 1.0, token))
        core.credit_requests(1.0)
    assert deadlines_s[-1] == pytest.approx(1.05)
    core.set_live_hubs(2)
    assert core.next_credit_request_s == pytest.approx(1.005)
    assert deadlines_s[-1] == core.next_credit_request_s


def test_another_process_at_an_address_begins_with_nothing_of_the_one_before() -> None:
    """1. a is in its slow start, has reported work, lost its session, and one dispatch has been silent for a second
    2. another process has its address: it has its own count, no reason, and begins its own slow start
    """
    core = Pool(0, LeastLoadBalancer(), PoolOptions())
    core.upsert(info("b"), 0.0)
    core.session_up("tcp://b:1", 0.0)
    core.upsert(info("a"), 20.0)
    core.session_up("tcp://a:1", 20.0)
    entry = core.members.entries["tcp://a:1"]
    core.report("tcp://a:1", 7, 20.5)
    assert not entry.silence.is_failure(1.0, 20.5, 5.0)
    core.session_down("tcp://a:1", 20.6, "it is gone")
    assert core.next_timer_s is not None
    core.upsert(replace(info("a", queue_length=2), pid=77), 20.7)
    assert core.next_timer_s is None
    assert (entry.reported, entry.down_since_s, entry.down_reason, entry.warm_at_s) == (2, 20.7, "", None)
    assert not entry.silence.is_failure(0.1, 25.0, 5.0)
    core.session_up("tcp://a:1", 31.0)
    assert (entry.first_up_s, entry.warm_at_s) == (31.0, 41.0)


def test_a_record_that_only_brings_another_load_is_what_the_next_pick_goes_by() -> None:
    core = Pool(0, LeastLoadBalancer(), PoolOptions(slow_start_s=0.0))
    for name in "ab":
        core.upsert(info(name), 0.0)
        core.session_up(f"tcp://{name}:1", 0.0)
    core.upsert(info("a", queue_length=3), 1.0)
    assert picked(core, "r") == info("b")


def waits(core: Pool, request_id: str, *avoid: str) -> Future[Binding]:
    """A pick that found no slot and waits."""
    token: Future[Binding] = Future()
    core.wait(Waiter(request_id, {}, None, avoid, 0, 0.0, token))
    return token


def weighted() -> Pool:
    """A heavy replica that lacks only a credit, and a light one that has a credit: who may wait, waits for heavy."""
    core = Pool(0, LeastLoadBalancer(), PoolOptions(slow_start_s=0.0))
    for name, weight in {"heavy": 2.0, "light": 1.0}.items():
        core.upsert(replace(info(name), weight=weight, capacity=4), 0.0)
        core.session_up(f"tcp://{name}:1", 0.0, uses_credits=True)
    core.report("tcp://light:1", 1, 0.0)
    core.grant("tcp://light:1", 4)
    return core


@pytest.mark.parametrize("change", ["record", "report", "session", "grant", "preference"])
def test_who_waits_for_the_best_is_served_once_it_has_a_credit_or_no_slot(change: str) -> None:
    core = weighted()
    token = waits(core, "r")
    assert not token.done()
    heavy = "tcp://heavy:1"
    match change:
        case "record":
            core.members.entries[heavy].reported_at_s = None
            core.upsert(replace(info("heavy", queue_length=9), weight=2.0, capacity=4), 1.0)
        case "report":
            core.report(heavy, 9, 1.0)
        case "session":
            core.session_down(heavy, 1.0)
        case "grant":
            core.grant(heavy, 1)
        case _:
            (waiter,) = [each for _, _, each in core.queue.waiters._heap]
            core.stop_preferring(waiter)
    assert token.result().addr == (heavy if change == "grant" else "tcp://light:1")


@pytest.mark.parametrize("change", ["release", "invalidate", "readmission", "session", "queue"])
def test_a_pick_that_waits_is_served_by_whatever_frees_a_slot(change: str) -> None:
    core = core_with("a")
    match change:
        case "release" | "invalidate":
            core.session_up("tcp://a:1", 0.0, uses_credits=True)
            core.grant("tcp://a:1", 1)
            binding = core.pick("first", {})
            assert binding is not None
        case "readmission":
            core.upsert(info("b"), 0.0)
            core.session_up("tcp://b:1", 0.0, uses_credits=True)
            for number in range(3):
                core.failed("tcp://a:1", 0.0, request_id=f"x{number}")
        case "session":
            core.session_down("tcp://a:1", 0.0)
        case _:
            core.send_queue_full("tcp://a:1", 0.0)
    token = waits(core, "r")
    assert not token.done()
    match change:
        case "release":
            core.release("first", BindingEnd.UNSENT)
        case "invalidate":
            core.members.entries["tcp://a:1"].credits = 1
            assert core.invalidate("tcp://a:1") == ["first"]
        case "readmission":
            core.run_timers(1.0)
        case "session":
            core.session_up("tcp://a:1", 1.0)
        case _:
            core.run_timers(0.05)
    assert token.done()
    assert token.result().addr == "tcp://a:1"


def test_no_hub_counts_as_this_one() -> None:
    core = core_with("a")
    core.set_live_hubs(0)
    assert core.members.hubs == 1


def test_what_is_said_of_a_stranger_changes_nothing() -> None:
    core = core_with("a")
    stranger = "tcp://x:1"
    core.hold(stranger, 0.0)
    core.unusable(stranger, "why")
    core.refuse(stranger, "why", 0.0)
    core.send_queue_full(stranger, 0.0)
    core.grant(stranger, 1)
    core.withdraw_success(stranger)
    assert not core.failed(stranger, 0.0)
    assert core.outlier_state(stranger) is OutlierState.FINE
    assert (addresses(core), core.next_timer_s) == (["tcp://a:1"], None)


def test_a_held_replica_is_picked_until_it_is_removed_or_listed_again() -> None:
    core = core_with("a")
    core.hold("tcp://a:1", 1.0)
    assert (addresses(core), core.members.registered_count, core.members.held_count) == (["tcp://a:1"], 0, 1)
    core.upsert(info("a"), 2.0)
    assert (core.members.registered_count, core.members.held_count) == (1, 0)
    core.hold("tcp://a:1", 3.0)
    core.remove("tcp://a:1", 4.0)
    assert (addresses(core), core.is_unused) == ([], True)


def test_a_refused_replica_is_not_picked_and_says_why() -> None:
    core = core_with("a")
    core.refuse("tcp://a:1", "another model", 1.0)
    assert (addresses(core), core.why_absent()) == ([], "1 registered: 1 refused (another model)")
    core.refuse("tcp://a:1", "", 2.0)
    assert (addresses(core), core.why_absent()) == (["tcp://a:1"], "")


def test_a_full_send_queue_keeps_picks_off_for_50_ms_since_it_was_full_last() -> None:
    core = core_with("a", "b")
    core.send_queue_full("tcp://a:1", 1.0)
    core.send_queue_full("tcp://a:1", 1.02)
    assert (addresses(core), core.next_timer_s) == (["tcp://b:1"], pytest.approx(1.07))
    core.run_timers(1.05)
    assert addresses(core) == ["tcp://b:1"]
    core.run_timers(core.next_timer_s or 0.0)
    assert (addresses(core), core.next_timer_s) == (["tcp://a:1", "tcp://b:1"], None)


def test_a_replica_that_is_gone_leaves_no_timer() -> None:
    core = Pool(0, RandomBalancer(), PoolOptions())
    for name, at_s in {"a": 0.0, "b": 20.0}.items():
        core.upsert(info(name), at_s)
        core.session_up(f"tcp://{name}:1", at_s)
    deadlines_s: list[float | None] = []
    core.watch_pool(deadlines_s.append, lambda: None)
    assert deadlines_s == [pytest.approx(0.5)], "of the slow start of b, whose first step is due at once"
    core.run_timers(20.0)
    core.send_queue_full("tcp://b:1", 20.1)
    core.remove("tcp://b:1", 20.2)
    assert (core.next_timer_s, deadlines_s[-1]) == (None, None)


def test_the_healthy_are_those_that_are_not_ejected_or_all_where_all_are() -> None:
    core = core_with("a", "b", "c")
    core.session_down("tcp://c:1", 0.0)
    for _ in range(3):
        core.failed("tcp://a:1", 0.0)
    assert core.healthy_addrs == {"tcp://a:1", "tcp://b:1"}, "too few would be left without a"
    core.session_up("tcp://c:1", 0.0)
    assert core.healthy_addrs == {"tcp://b:1", "tcp://c:1"}
    core.session_down("tcp://b:1", 0.0)
    core.session_down("tcp://c:1", 0.0)
    assert core.healthy_addrs == {"tcp://a:1"}


def test_where_a_request_is_bound_it_stays_unless_it_has_to_avoid_that() -> None:
    """1. r is at a, and is picked there again; 2. it has to avoid a: its binding there ends, and b gets it
    3. its companion follows it; one that has to avoid b, or whose parent's replica is cordoned, does not
    """
    core = core_with("a")
    first = core.pick("r", {})
    assert first is not None
    assert core.pick("r", {}) is first
    core.upsert(info("b"), 0.0)
    core.session_up("tcp://b:1", 0.0)
    moved = core.pick("r", {}, None, {"tcp://a:1"})
    assert moved is not None
    assert (moved.addr, first.state, core.members.in_flight("tcp://a:1")) == ("tcp://b:1", BindingState.RELEASED, [])
    for number in range(8):
        assert core.pick(f"c{number}", {}, "r") is not None
        assert core.bound(f"c{number}") == "tcp://b:1"
    aside = core.pick("d", {}, "r", {"tcp://b:1"})
    assert aside is not None
    assert aside.addr == "tcp://a:1"
    core.upsert(replace(info("b"), cordoned=True), 1.0)
    away = core.pick("e", {}, "r")
    assert away is not None
    assert away.addr == "tcp://a:1"


def test_a_credit_that_is_recalled_is_asked_for_again_by_who_waits() -> None:
    core = core_with("a")
    core.session_up("tcp://a:1", 0.0, uses_credits=True)
    core.grant("tcp://a:1", 2)
    assert (core.recall("tcp://a:1", -1), core.recall("tcp://a:1", 1), core.members.credits("tcp://a:1")) == (0, 1, 1)
    core.grant("tcp://a:1", 0)
    core.grant("tcp://a:1", -1)
    assert core.members.credits("tcp://a:1") == 1


def test_a_stage_whose_replicas_are_all_fine_has_no_trouble_and_one_that_is_ejected_is_one() -> None:
    core = core_with("a", "b")
    assert core.troubles(10.0, 1000.0) == ([], 0)
    for _ in range(3):
        core.failed("tcp://a:1", 10.0)
    (trouble,) = core.troubles(10.5, 1000.0).shown
    assert (trouble.since, trouble.until, trouble.is_picked) == (999.5, 1000.5, False)
    core.session_down("tcp://b:1", 10.5, "it is gone")
    ejected, silent = core.troubles(11.5, 1000.0).shown
    assert (ejected.is_picked, silent.since, silent.reason) == (True, 999.0, "it is gone")


_names = st.sampled_from("abc")
_steps = st.one_of(
    st.tuples(st.sampled_from(["upsert", "remove", "up", "down", "invalidate"]), _names),
    st.tuples(st.just("bind"), _names, st.sampled_from(["r1", "r2", "r3"])),
    st.tuples(st.just("release"), st.sampled_from(["r1", "r2", "r3"])),
    st.tuples(st.just("report"), _names, st.integers(0, 9)),
)


@given(st.lists(_steps, max_size=40))
def test_bindings_and_in_flight_never_disagree(steps: list[tuple[str, str, str]]) -> None:
    core = Pool(0, RandomBalancer(), PoolOptions(slow_start_s=0.0))
    for step in steps:
        match step:
            case "upsert", name:
                core.upsert(replace(info(name), queue_length=2), 0.0)
            case "bind", name, request_id:
                if core.members.get(f"tcp://{name}:1") is not None:
                    core.bind(request_id, f"tcp://{name}:1")
            case "release", request_id:
                core.release(request_id)
            case "report", name, length:
                core.report(f"tcp://{name}:1", int(length), 0.0)
            case verb, name:
                up = partial(core.session_up, now_s=0.0)
                remove, down = partial(core.remove, now_s=0.0), partial(core.session_down, now_s=0.0)
                calls = {"remove": remove, "up": up, "down": down}
                calls.get(verb, core.invalidate)(f"tcp://{name}:1")
    for name in "abc":
        addr = f"tcp://{name}:1"
        assert core.members.in_flight(addr) == [r for r in core.members.in_flight(addr) if core.bound(r) == addr]
    bound = [r for r in ("r1", "r2", "r3") if core.bound(r)]
    assert sorted(bound) == sorted(r for name in "abc" for r in core.members.in_flight(f"tcp://{name}:1"))
    assert all(each.queue_length >= 0 for each in core.candidates())
