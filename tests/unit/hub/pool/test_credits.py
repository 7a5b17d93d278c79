"""Credits: a replica that grants them is picked as far as they reach, and nobody else is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hub.config import PoolOptions
from hub.pool.core import Pool
from hub.pool.credits import CreditRequest, CreditRequester, CreditStarved, _outweighs
from hub.pool.entry import BindingEnd
from omni_discovery.balancing.policies import (
    LeastLoadBalancer,
    LoadBalancingPolicy,
    RoundRobinBalancer,
    build_load_balancer_factory,
)
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from tests.support.pools import accept, spent_credit

TASK: Any = {"request_id": "r"}


def info(name: str, replica_id: int = 0, **more: Any) -> ReplicaInfo:
    return replace(ReplicaInfo(name, "", 0, ReplicaStatus.UP, 0, 0.0, 0.0, replica_id, capacity=4), **more)


def core_of(*names: str, gated: bool = True, **options: Any) -> Pool:
    core = Pool(0, RoundRobinBalancer(), PoolOptions(**options))
    for number, name in enumerate(names):
        core.upsert(info(name, number), 0.0)
        core.session_up(name, 0.0, uses_credits=gated)
    return core


def where(core: Pool, request_id: str, *avoid: str) -> str | None:
    found = core.pick(request_id, TASK, avoid=avoid)
    return None if found is None else found.addr


def test_a_gated_replica_is_picked_once_for_each_credit() -> None:
    core = core_of("a", "b")
    assert where(core, "r0") is None
    core.grant("a", 2)
    assert [where(core, f"r{number}") for number in range(3)] == ["a", "a", None]
    assert [spent_credit(core, f"r{number}") for number in range(3)] == [True, True, False]
    core.release("r0")
    assert where(core, "r4") is None, "the slot is the replica's to give again"
    core.grant("b", 1)
    assert where(core, "r4") == "b"


def test_an_ungated_replica_needs_no_credits_and_takes_none() -> None:
    core = core_of("a", gated=False)
    core.grant("a", 3)
    assert [where(core, f"r{number}") for number in range(5)] == ["a"] * 5
    assert core.members.credits("a") == 0
    assert not spent_credit(core, "r0")


def test_an_affinity_is_kept_even_without_a_credit() -> None:
    core = core_of("a", "b")
    core.grant("a", 1)
    core.grant("b", 1)
    assert where(core, "parent") == "a"
    found = core.pick("child", TASK, "parent")
    assert found is not None
    assert found.addr == "a"
    assert spent_credit(core, "parent")
    assert not spent_credit(core, "child")
    assert where(core, "parent") == "a"
    assert spent_credit(core, "parent"), "picked again where it is, it spends nothing more"


def test_a_recall_gets_what_is_not_spent() -> None:
    core = core_of("a")
    core.grant("a", 3)
    assert where(core, "r0") == "a"
    assert core.recall("a", 5) == 2
    assert core.recall("a", 5) == core.recall("nobody", 1) == 0
    assert where(core, "r1") is None


def test_the_credit_of_a_request_that_was_never_sent_is_there_again() -> None:
    core = core_of("a")
    core.grant("a", 1)
    assert where(core, "r0") == "a"
    assert core.release("r0", BindingEnd.UNSENT) == "a"
    assert where(core, "r1") == "a"
    core.release("r1")
    assert where(core, "r2") is None


def test_credits_end_with_their_session() -> None:
    """1. two credits, one spent; the session is lost and a new one begins without any
    2. the request of the old session spent nothing of the new one, and gives nothing back
    """
    core = core_of("a")
    core.grant("a", 2)
    assert where(core, "r0") == "a"
    core.session_down("a", 0.0)
    core.grant("a", 5)
    core.session_up("a", 1.0, uses_credits=True)
    assert core.members.credits("a") == 0
    assert not spent_credit(core, "r0")
    core.release("r0", BindingEnd.UNSENT)
    assert where(core, "r1") is None


def test_where_one_to_avoid_has_the_only_credits_a_pick_waits() -> None:
    core = core_of("a", "b")
    core.grant("a", 1)
    assert where(core, "r", "a") is None
    assert not core.all_avoided({"a"})
    assert core.all_avoided({"a", "b"})
    assert (core.has_free(), core.has_free({"a"}), core.has_free({"b"})) == (True, False, True)


def test_a_success_says_whether_it_ended_an_ejection() -> None:
    core = core_of("a", "b", "c", gated=False)
    assert core.succeeded("a", 1.0, 0.0) is False
    assert core.succeeded("unknown", 1.0, 0.0) is False
    for number in range(5):
        core.failed("a", 1.0, "it broke", f"r{number}")
    assert list(core.outliers.ejected) == ["a"]
    core.run_timers(1000.0)
    assert where(core, "probe", "b", "c") == "a"
    assert core.succeeded("a", 1.0, 1000.0) is True
    assert core.succeeded("a", 1.0, 1000.0) is False


def test_a_heavier_replica_outweighs_one_that_is_not_nearer_and_not_less_loaded() -> None:
    core = core_of("light", "heavy", gated=False)
    core.upsert(info("heavy", 1, weight=3.0), 0.0)
    light, heavy = core.members.entries["light"], core.members.entries["heavy"]
    for in_flight in (light, heavy):
        in_flight.report(2, 1)
    assert _outweighs(heavy, light)
    assert not _outweighs(light, heavy)
    light.is_local, heavy.is_local = True, False
    assert not _outweighs(heavy, light), "it is farther"
    heavy.is_local = True
    assert _outweighs(heavy, light)
    heavy.report(9, 1)
    assert not _outweighs(heavy, light)


def test_near_comes_first_and_far_when_near_has_no_slot() -> None:
    core = core_of(labels={"rack": "1", "zone": "x"})
    core.upsert(info("far", 0, labels={"rack": "2", "zone": "x"}), 0.0)
    core.upsert(info("near", 1, labels={"rack": "1", "zone": "x", "more": "y"}), 0.0)
    for name in ("far", "near"):
        core.session_up(name, 0.0, uses_credits=True)
        core.grant(name, 2)
    assert [where(core, f"r{number}") for number in range(5)] == ["near", "near", "far", "far", None]


def test_near_and_ungated_has_as_many_slots_as_capacity() -> None:
    """Then near and far are alike, as they are where nobody is near."""
    core = core_of(labels={"rack": "1"})
    for number, (name, rack) in enumerate({"far": "2", "near": "1", "alike": "1"}.items()):
        core.upsert(info(name, number, labels={"rack": rack}), 0.0)
        core.session_up(name, 0.0)
    found = [where(core, f"r{number}") for number in range(8)]
    assert sorted(set(found), key=str) == ["alike", "near"]
    assert {where(core, f"s{number}") for number in range(12)} == {"far", "near", "alike"}
    core.session_down("near", 0.0)
    core.session_down("alike", 0.0)
    assert where(core, "t") == "far"


def test_a_newcomer_comes_to_its_weight_by_and_by() -> None:
    """1. the first of a pool and those that come soon after have their whole weight at once
    2. who comes later begins with a tenth, and has it all after ten seconds
    3. a session lost and found again is no new beginning
    """
    core = core_of("a", "b", gated=False)
    core.upsert(info("c", 2), 30.0)
    core.session_up("c", 30.0)

    def share(number: int = 210) -> int:
        picked = [where(core, f"{core.next_timer_s} {each}") for each in range(number)]
        for each in range(number):
            core.release(f"{core.next_timer_s} {each}")
        return picked.count("c")

    assert 8 <= share() <= 12
    assert core.next_timer_s is not None
    core.run_timers(35.0)
    core.session_down("c", 35.0)
    core.session_up("c", 35.1)
    assert 40 <= share() <= 55
    core.run_timers(40.1)
    assert 68 <= share() <= 72
    assert core.next_timer_s is None


def test_a_pool_whose_hub_has_lost_everybody_for_a_while_does_not_start_slowly() -> None:
    core = core_of("a", "b", gated=False)
    core.session_down("a", 0.0)
    core.session_down("b", 0.0)
    core.upsert(info("c", 2), 100.0)
    for name in "abc":
        core.session_up(name, 100.0)
    assert core.next_timer_s is None


def test_slots_and_mean_service_time() -> None:
    core = core_of("a", "b")
    assert core.members.slots == 8
    assert core.mean_service_s is None
    core.upsert(info("a", 0, capacity=6), 1.0)
    assert core.members.slots == 10
    core.session_down("b", 0.0)
    assert core.members.slots == 6
    core.upsert(info("b", 1, capacity=1), 1.0)
    core.session_up("b", 1.0)
    assert core.members.slots == 7
    core.succeeded("a", 1.0, 0.0)
    core.succeeded("a", 2.0, 0.0)
    core.succeeded("a", None, 0.0)
    assert core.mean_service_s == 1.05


def test_nobody_is_asked_who_is_left_out_for_its_failures() -> None:
    core = core_of("a", "b", "c")
    for _ in range(3):
        core.failed("a", 0.0)
    assert core.credit_replicas() == ("b", "c")


_names = st.sampled_from("abc")
_requests = st.integers(0, 7).map("r{}".format)
_steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["up", "down", "upsert", "remove", "free"]), _names),
        st.tuples(st.sampled_from(["grant", "recall"]), _names, st.integers(0, 3)),
        st.tuples(st.sampled_from(["pick", "release", "unsent", "fail", "accepted"]), _requests),
        st.tuples(st.just("companion"), _requests, _requests),
        st.tuples(st.just("avoid"), _requests, _names),
    ),
    max_size=80,
)


class Book:
    """What the replicas would say: what each granted in the session that is up, less what came back or was spent."""

    def __init__(self) -> None:
        self.unspent: dict[str, int] = {}
        self.gated: dict[str, bool] = {}
        self.up: set[str] = set()


@given(_steps, st.sampled_from(list(LoadBalancingPolicy)))
def test_no_credit_is_spent_twice_and_none_is_lost(steps: list[Any], policy: str) -> None:
    """The hub's count of unspent credits is at each moment what the replica's book says."""
    core, book = Pool(0, build_load_balancer_factory(policy)(), PoolOptions(labels={"x": "1"})), Book()
    for number, step in enumerate(steps):
        take(core, book, number, *step)
        for name in "abc":
            assert core.members.credits(name) == book.unspent.get(name, 0) >= 0
        free = {each.input_addr for each in core.candidates()}
        assert core.free_count == len(free)
        for name in "abc":
            gated = book.gated.get(name, False)
            assert (name in free) <= (core.members.serviceable(name) and (not gated or book.unspent.get(name, 0) > 0))


def take(core: Pool, book: Book, number: int, verb: str, name: str, more: Any = None) -> None:
    if name.startswith("r"):
        of_a_request(core, book, number, verb, name, more)
    else:
        of_a_replica(core, book, number, verb, name, more)
    for each in "abc":
        if core.members.get(each) is None:
            book.unspent[each] = 0
            book.up.discard(each)


def of_a_replica(core: Pool, book: Book, number: int, verb: str, name: str, more: Any) -> None:
    match verb:
        case "upsert":
            core.upsert(info(name, ord(name), labels={"x": str(number % 2)}), float(number))
        case "remove":
            core.remove(name, float(number))
        case "up" | "free" if core.members.get(name) is not None:
            core.session_up(name, float(number), uses_credits=verb == "up")
            book.unspent[name], book.gated[name] = 0, verb == "up"
            book.up.add(name)
        case "down":
            core.session_down(name, float(number))
            book.unspent[name] = 0
            book.up.discard(name)
        case "grant":
            core.grant(name, more)
            if name in book.up and book.gated[name]:
                book.unspent[name] += more
        case "recall":
            given_up = core.recall(name, more)
            assert given_up == min(more, book.unspent.get(name, 0))
            book.unspent[name] = book.unspent.get(name, 0) - given_up


def of_a_request(core: Pool, book: Book, number: int, verb: str, name: str, more: Any) -> None:
    addr, had = core.bound(name), spent_credit(core, name)
    if verb == "accepted":
        accept(core, name)
    elif verb == "fail":
        core.failed(addr or "nobody", float(number))
    elif verb in ("release", "unsent"):
        assert core.release(name, BindingEnd.UNSENT if verb == "unsent" else BindingEnd.DONE) == addr
        if addr is not None and had and verb == "unsent":
            book.unspent[addr] += 1
    else:
        found = core.pick(name, TASK, more if verb == "companion" else None, {more} if verb == "avoid" else ())
        if found is not None and spent_credit(core, name) and not (addr == found.addr and had):
            book.unspent[found.addr] -= 1


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.sampled_from([0.01, 0.03, 0.2])), max_size=60))
def test_what_replicas_were_told_last_is_never_more_than_is_wanted_of_16(steps: list[tuple[int, int, float]]) -> None:
    """A replica's book by what it was told: within 50 ms of a change it asks for about what is waited for."""
    asking, book, now_s = CreditRequester(), dict[str, int](), 0.0
    last_s: dict[str, float] = {}
    for waiting, givers, passes_s in steps:
        now_s += passes_s
        wants: list[Any] = asking.due(now_s, waiting, 1.0, [f"a{number}" for number in range(givers)])
        for want in wants:
            if want.waiting and book.get(want.addr):
                assert now_s - last_s[want.addr] >= 0.0499
            book[want.addr], last_s[want.addr] = want.waiting, now_s
        asked = [count for count in book.values() if count]
        assert len(asked) <= 16
        if wants and waiting and givers:
            assert waiting <= sum(asked) < waiting + 16
        if not waiting:
            assert not asked
            assert asking.next_s(0, givers) is None
        elif givers:
            assert asking.next_s(waiting, givers) is not None


def test_as_many_as_are_asked_at_once_are_asked_in_their_order_each_time() -> None:
    requester, addrs = CreditRequester(), [f"a{number}" for number in range(16)]
    for now_s in (0.0, 100.0):
        requests = requester.due(now_s, 32, 1.0, addrs)
        assert [(each.addr, each.waiting) for each in requests] == [(addr, 2) for addr in addrs]
    more = requester.due(200.0, 17, 1.0, [*addrs, "a16"])
    assert [(each.addr, each.waiting) for each in more] == [(addr, 2) for addr in addrs], "nobody's turn has passed"


def starved_pool(**options: Any) -> tuple[Pool, CreditStarved]:
    """A heavy and a light replica that lend credits, and have lent none."""
    core = Pool(0, LeastLoadBalancer(), PoolOptions(slow_start_s=0.0, **options))
    for name, weight in {"heavy": 3.0, "light": 1.0}.items():
        core.upsert(info(name, weight=weight, labels={"rack": name}), 0.0)
        core.session_up(name, 0.0, uses_credits=True)
    core.report("heavy", 1, 0.0)
    return core, core.indices.starved


def test_a_heavier_replica_that_lacks_only_a_credit_is_starved_with_the_slots_that_it_has_left() -> None:
    core, starved = starved_pool()
    assert (starved.addrs(), starved.free_slots(), core.starved_slots) == (("heavy",), 3, 3)
    assert core.credit_replicas() == ("heavy", "light")


@pytest.mark.parametrize("change", ["grant", "full", "beyond", "session", "cordon", "ungated", "queue", "light"])
def test_one_that_is_free_or_lacks_more_than_a_credit_is_not_starved(change: str) -> None:
    core, starved = starved_pool()
    match change:
        case "grant":
            core.grant("heavy", 1)
        case "full" | "beyond":
            core.report("heavy", 4 if change == "full" else 5, 1.0)
        case "session":
            core.session_down("heavy", 1.0)
        case "cordon":
            core.upsert(info("heavy", weight=3.0, cordoned=True), 1.0)
        case "ungated":
            core.session_up("heavy", 1.0)
        case "queue":
            core.send_queue_full("heavy", 1.0)
        case _:
            core.upsert(info("heavy", weight=1.0), 1.0)
    assert (starved.addrs(), starved.free_slots(), core.starved_slots) == ((), 0, None)
    assert starved.is_active


def test_a_local_replica_that_lacks_a_credit_is_asked_before_a_heavier_one() -> None:
    core, starved = starved_pool(labels={"rack": "light"})
    core.report("light", 2, 0.0)
    assert (starved.addrs(), starved.free_slots()) == (("light",), 2)
    core.grant("light", 1)
    assert (starved.addrs(), starved.free_slots()) == (("heavy",), 3)


def test_nobody_is_starved_where_all_weigh_the_same_or_the_policy_knows_no_weights() -> None:
    for weights, noted, is_active in [
        (True, [2.0], False),
        (True, [2.0, 2.0], False),
        (True, [2.0, 1.0], True),
        (True, [1.0, 2.0, 1.0], True),
        (False, [1.0, 2.0], False),
    ]:
        starved = CreditStarved(labels=False, weights=weights)
        for weight in noted:
            starved.note_weight(weight)
        assert starved.is_active is is_active
    core = core_of("a", labels={"rack": "1"})
    core.upsert(info("b", 1, weight=9.0), 0.0)
    core.session_up("b", 0.0, uses_credits=True)
    assert core.indices.starved.addrs() == ()


def test_a_pick_waits_for_a_heavier_replica_that_is_less_loaded_for_its_weight() -> None:
    """1. heavy lacks a credit: who may wait does not take light; 2. who has to avoid heavy does; 3. heavy is ejected"""
    core, starved = starved_pool()
    light = core.members.entries["light"]
    core.report("light", 1, 0.0)
    core.grant("light", 4)
    assert starved.has_better(light)
    assert core.pick("r", TASK, may_wait=True) is None
    assert not starved.has_better(light, {"heavy"})
    assert where(core, "r") == "light"
    for _ in range(3):
        core.failed("heavy", 0.0)
    assert not starved.has_better(light)


def test_a_pick_waits_for_a_local_replica_but_not_for_one_of_two_local_ones() -> None:
    core, starved = starved_pool(labels={"rack": "light"})
    heavy, light = (core.members.entries[name] for name in ("heavy", "light"))
    assert starved.has_better(heavy)
    assert not starved.has_better(heavy, {"light"})
    assert not starved.has_better(light), "heavy is farther"
    for _ in range(3):
        core.failed("light", 0.0)
    assert not starved.has_better(heavy)


def test_the_load_that_two_weights_are_compared_by_is_that_of_each_slot() -> None:
    core = core_of("a", "b", gated=False)
    core.upsert(info("b", 1, weight=2.0, capacity=2), 0.0)
    a, b = core.members.entries["a"], core.members.entries["b"]
    a.weight, b.weight = 1.0, 2.0
    for load_a, load_b, outweighs in [(2, 1, True), (1, 1, False), (2, 2, False), (0, 0, False)]:
        a.report(load_a, 1)
        b.report(load_b, 1)
        assert _outweighs(b, a) is outweighs
    a.report(4, 1)
    core.upsert(info("b", 1, weight=1.0), 0.0)
    assert not _outweighs(b, a), "its record has no more weight"


def test_requests_are_repeated_after_50_ms_or_5_ms_where_more_wait_that_are_in_a_hurry() -> None:
    requester = CreditRequester()
    assert (requester.has_asked, requester.next_s(0, 2), requester.next_s(1, 0)) == (False, None, None)
    assert (requester.is_due(1.0, 0), requester.due(1.0, 0, 0.0, ["a"])) == (False, [])
    assert requester.next_s(1, 2) == 0.0
    assert requester.due(1.0, 3, 0.5, ["a", "b"]) == [CreditRequest("a", 2, 0.5), CreditRequest("b", 2, 0.5)]
    assert requester.has_asked
    assert requester.next_s(3, 2, hurry=True) == requester.next_s(4, 2) == pytest.approx(1.05)
    assert requester.next_s(4, 2, hurry=True) == pytest.approx(1.005)
    assert requester.is_due(1.0 + 0.05, 3)
    assert requester.due(1.049, 4, 0.5, ["a"]) == requester.due(1.0049, 4, 0.5, ["a"], hurry=True) == []
    assert requester.due(1.0051, 4, 0.6, ["a"], hurry=True) == [CreditRequest("b", 0, 0.0), CreditRequest("a", 4, 0.6)]
    assert requester.next_s(0, 2) == 0.0
    assert requester.due(1.006, 0, 0.0, ["a"]) == [CreditRequest("a", 0, 0.0)]
    assert not requester.has_asked


def test_nobody_is_asked_where_nobody_lends() -> None:
    requester = CreditRequester()
    assert requester.due(1.0, 3, 0.5, []) == []
    assert not requester.has_asked


def test_of_more_than_sixteen_the_next_ones_are_asked_each_time_and_the_others_are_told() -> None:
    requester, addrs = CreditRequester(), [f"a{number}" for number in range(20)]
    asked = [[each.addr for each in requester.due(now_s, 16, 1.0, addrs) if each.waiting] for now_s in (0.0, 1.0, 2.0)]
    assert asked[0] == addrs[:16]
    assert asked[1] == [*addrs[16:], *addrs[:12]]
    assert asked[2] == [*addrs[12:], *addrs[:8]]
    withdrawn = [each.addr for each in requester.due(3.0, 16, 1.0, addrs[:3]) if not each.waiting]
    assert withdrawn == [*addrs[12:], *addrs[3:8]]
