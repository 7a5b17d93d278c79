"""Who keeps failing is left out for a while; never so many that too few are left."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hub.config import PoolOptions
from hub.pool.core import Pool
from hub.pool.outliers import Health, Outliers, OutlierState, most_ejected
from omni_discovery.balancing.base import LoadBalancer
from omni_discovery.balancing.policies import LeastLoadBalancer, RoundRobinBalancer
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from tests.support.pools import accept

TASK: Any = {"request_id": "r"}


def info(number: int) -> ReplicaInfo:
    return ReplicaInfo(f"a{number}", "", 0, ReplicaStatus.UP, 0, 0.0, 0.0, number, capacity=8)


@dataclass
class Replica:
    """All that the rules need to know."""

    addr: str
    health: Health = field(default_factory=Health)
    pickable: bool = True


def test_the_rules_need_no_pool() -> None:
    """1. a fails three times and is ejected for a second; b is not: one of two is the most
    2. the second is over: a is probed by one request, which is served
    """
    outliers: Outliers[Replica] = Outliers(1.0, 60.0)
    a, b = Replica("a"), Replica("b")
    assert [outliers.failed(a, 2, 10.0) for _ in range(3)] == [False, False, True]
    assert not any(outliers.failed(b, 2, 10.0) for _ in range(5))
    assert outliers.next_end_s == 11.0
    assert (outliers.is_ejected(a), outliers.is_ejected(b)) == (True, False)
    assert outliers.end_ejections(10.9) == []
    assert outliers.end_ejections(11.0) == [a]
    a.health.start_probe("r")
    assert outliers.is_ejected(a)
    assert outliers.succeeded(a, 11.5)
    assert (len(outliers), a.health.state) == (0, OutlierState.FINE)


def test_ejections_are_ignored_while_fewer_than_half_of_the_listed_are_left() -> None:
    outliers: Outliers[Replica] = Outliers(1.0, 60.0)
    a = Replica("a")
    for _ in range(3):
        outliers.failed(a, 4, 0.0)
    assert not outliers.update_panic(4, 4)
    assert outliers.update_panic(2, 4)
    assert outliers.panics
    assert not outliers.is_ejected(a)
    assert outliers.forget("a")
    assert outliers.update_panic(1, 3)
    assert not outliers.panics


def test_a_probe_that_shows_nothing_lets_another_request_probe() -> None:
    health = Health()
    health.eject(0.0, 1.0, 60.0)
    health.end_ejection()
    health.start_probe("r")
    assert (health.is_blocked, health.needs_probe, health.probe) == (True, False, "r")
    health.cancel_probe()
    assert (health.is_blocked, health.needs_probe, health.probe) == (False, True, None)


def core_of(count: int, balancer: LoadBalancer | None = None) -> Pool:
    core = Pool(0, balancer or RoundRobinBalancer(), PoolOptions(slow_start_s=0.0))
    for number in range(count):
        core.upsert(info(number), 0.0)
        core.session_up(f"a{number}", 0.0)
    return core


def fail(core: Pool, addr: str, now_s: float = 0.0, times: int = 3) -> None:
    for _ in range(times):
        core.failed(addr, now_s)


def picks(core: Pool, count: int = 40) -> set[str]:
    """Where so many requests go that end at once."""
    found = set()
    for number in range(count):
        picked = core.pick(f"p{number}", TASK)
        assert picked is not None
        found.add(picked.addr)
        core.release(f"p{number}")
    return found


def test_three_failures_in_a_row_eject_and_a_success_between_them_does_not() -> None:
    core = core_of(4)
    fail(core, "a0", times=2)
    core.succeeded("a0", None, 0.0)
    fail(core, "a0", times=2)
    assert picks(core) == {"a0", "a1", "a2", "a3"}
    core.failed("a0", 0.0)
    assert core.outlier_state("a0") is OutlierState.EJECTED
    assert picks(core) == {"a1", "a2", "a3"}
    assert (len(core.outliers), core.members.pickable_count) == (1, 4)


def test_more_failures_than_successes_of_the_last_ten_or_more_eject() -> None:
    core = core_of(4)
    for _ in range(4):
        core.succeeded("a0", None, 0.0)
        fail(core, "a0", times=1)
    core.succeeded("a0", None, 0.0)
    fail(core, "a0", times=1)
    assert core.outlier_state("a0") is OutlierState.FINE, "five of ten are not more than half"
    core.failed("a0", 0.0)
    assert core.outlier_state("a0") is OutlierState.EJECTED


def test_an_old_record_of_failures_is_forgotten() -> None:
    core = core_of(4)
    for _ in range(9):
        core.succeeded("a1", None, 0.0)
        core.failed("a1", 0.0)
    for _ in range(20):
        core.succeeded("a1", None, 0.0)
    fail(core, "a1", times=2)
    assert core.outlier_state("a1") is OutlierState.FINE


def test_an_ejection_lasts_a_second_and_twice_as_long_each_time_up_to_a_minute() -> None:
    core, now_s, lengths = core_of(4), 0.0, []
    fail(core, "a0", now_s)
    for _ in range(8):
        until_s = core.next_timer_s
        assert until_s is not None
        lengths.append(until_s - now_s)
        core.run_timers(until_s - 0.001)
        assert "a0" not in picks(core)
        now_s = until_s
        core.run_timers(now_s)
        assert "a0" in picks(core)
        core.failed("a0", now_s)
    assert lengths == [1, 2, 4, 8, 16, 32, 60, 60]


def test_after_a_quiet_minute_an_ejection_is_short_again() -> None:
    core = core_of(4)
    fail(core, "a0", 0.0)
    core.run_timers(1.0)
    core.succeeded("a0", None, 1.0)
    fail(core, "a0", 30.0)
    assert core.next_timer_s == 32.0
    core.run_timers(32.0)
    core.succeeded("a0", None, 32.0)
    fail(core, "a0", 100.0)
    assert core.next_timer_s == 101.0


def test_half_open_is_one_request_at_a_time_until_one_is_served() -> None:
    """1. the time of a0 is over: one request gets there, the next ones don't
    2. that one is cancelled, which says nothing: another one gets there
    3. it is served: a0 is as good as the others
    """
    core = core_of(2)
    fail(core, "a0", 0.0)
    core.run_timers(1.0)
    assert core.outlier_state("a0") is OutlierState.PROBED
    found = [core.pick(f"r{number}", TASK) for number in range(4)]
    assert [each.addr for each in found if each is not None].count("a0") == 1
    probe = core.members.in_flight("a0")[0]
    core.release(probe)
    found = [core.pick(f"s{number}", TASK) for number in range(4)]
    assert [each.addr for each in found if each is not None].count("a0") == 1
    core.succeeded("a0", 0.1, 1.2)
    assert core.outlier_state("a0") is OutlierState.FINE
    assert len(core.outliers) == 0
    core.release(core.members.in_flight("a0")[0])
    assert picks(core) == {"a0", "a1"}


def test_no_more_than_a_tenth_is_ejected_at_one_time_and_never_less_than_one() -> None:
    assert [most_ejected(count) for count in (1, 2, 19, 20, 100)] == [1, 1, 1, 2, 10]
    core = core_of(25)
    for number in range(25):
        fail(core, f"a{number}", times=5)
    assert len(core.outliers) == 2
    assert len(picks(core, 100)) == 23


def test_who_is_alone_is_never_ejected_to_nothing() -> None:
    core = core_of(1)
    fail(core, "a0", times=30)
    assert core.outliers.panics
    assert picks(core) == {"a0"}
    core.upsert(info(1), 1.0)
    core.session_up("a1", 1.0)
    assert not core.outliers.panics
    assert picks(core) == {"a1"}


def test_panic_when_fewer_than_half_would_be_left() -> None:
    """1. four are listed, one is ejected, one is silent: two are left, just half
    2. another one falls silent: the ejected one is picked all the same
    3. it comes back: the ejection holds again
    """
    core = core_of(4)
    fail(core, "a0")
    core.session_down("a1", 0.0)
    assert picks(core) == {"a2", "a3"}
    core.session_down("a2", 0.0)
    assert picks(core) == {"a0", "a3"}
    core.session_up("a2", 0.0)
    assert picks(core) == {"a2", "a3"}


def test_rather_one_that_is_ejected_than_nobody_for_who_has_tried_all_others() -> None:
    core = core_of(2)
    fail(core, "a0")
    found = core.pick("r", TASK, avoid={"a1"})
    assert found is not None
    assert found.addr == "a0"
    core.release("r")
    assert core.pick("r", TASK, avoid={"a0", "a1"}) is None
    assert core.all_avoided({"a0", "a1"})


def test_a_bound_request_stays_where_it_is_though_that_is_ejected() -> None:
    core = core_of(3)
    core.bind("r", "a0")
    fail(core, "a0")
    assert [each and each.info for each in (core.pick("r", TASK), core.pick("child", TASK, "r"))] == [info(0), info(0)]


def test_another_process_at_the_address_has_a_clean_sheet() -> None:
    core = core_of(3)
    fail(core, "a0")
    core.upsert(replace(info(0), pid=77), 0.0)
    assert core.outlier_state("a0") is OutlierState.FINE
    assert len(core.outliers) == 0
    assert picks(core) == {"a0", "a1", "a2"}


def test_who_is_gone_does_not_count_as_ejected() -> None:
    core = core_of(3)
    fail(core, "a0")
    core.remove("a0", 0.0)
    assert len(core.outliers) == 0
    fail(core, "a1")
    assert core.outlier_state("a1") is OutlierState.EJECTED
    core.failed("nobody", 0.0)
    core.succeeded("nobody", None, 0.0)


def test_a_black_hole_gets_less_than_two_percent_after_a_while() -> None:
    """One of ten takes every request and fails it at once, so it always looks idle. 200 requests per second."""
    core, chance = core_of(10, LeastLoadBalancer()), random.Random(1)
    busy: list[tuple[float, str, str]] = []
    share = [0, 0]
    for number in range(200 * 40):
        now_s = number / 200
        while core.next_timer_s is not None and core.next_timer_s <= now_s:
            core.run_timers(now_s)
        for ended in [each for each in busy if each[0] <= now_s]:
            busy.remove(ended)
            (core.failed if ended[2] == "a3" else lambda addr, at_s: core.succeeded(addr, 0.2, at_s))(ended[2], now_s)
            core.release(ended[1])
        found = core.pick(f"r{number}", TASK)
        assert found is not None
        takes_s = 0.001 if found.addr == "a3" else chance.expovariate(1 / 0.2)
        busy.append((now_s + takes_s, f"r{number}", found.addr))
        if now_s >= 5:
            share[found.addr == "a3"] += 1
    assert share[1] < 0.02 * sum(share)
    assert share[1] > 0, "it is tried now and then"


def test_ten_thousand_bad_requests_eject_nobody() -> None:
    """A request that is itself at fault ends like one that was cancelled: the pool hears of no failure."""
    core = core_of(3)
    for number in range(10_000):
        found = core.pick(f"r{number}", TASK)
        assert found is not None
        accept(core, f"r{number}")
        core.release(f"r{number}")
    assert len(core.outliers) == 0
    assert all(core.outlier_state(f"a{number}") is OutlierState.FINE for number in range(3))


@pytest.mark.attack("A14")
def test_a_request_that_fails_at_a_second_replica_is_excused_at_the_first() -> None:
    """1. three requests fail at a0, which is ejected at once, and then at a1: each is excused
    2. with the first of them gone a0 is back, before its time is over
    """
    core = core_of(2)
    assert [core.failed("a0", 0.0, request_id=f"r{number}") for number in range(3)] == [False, False, True]
    assert [core.excuse("a0", f"r{number}", 0.1) for number in range(3)] == [True, False, False]
    assert core.outlier_state("a0") is OutlierState.FINE
    assert core.next_timer_s is None
    assert picks(core) == {"a0", "a1"}
    assert not core.excuse("nobody", "r1", 0.1)


def test_a_failed_probe_that_is_excused_costs_no_longer_ejection() -> None:
    """1. a0 is ejected for a second and then probed; 2. the probe fails, but elsewhere, too; 3. the next one probes"""
    core = core_of(2)
    fail(core, "a0")
    core.run_timers(1.0)
    core.bind("bad", "a0")
    assert core.failed("a0", 1.0, request_id="bad")
    core.release("bad")
    core.excuse("a0", "bad", 1.1)
    assert core.outlier_state("a0") is OutlierState.PROBED
    core.bind("worse", "a0")
    assert core.failed("a0", 1.2, request_id="worse")
    assert core.next_timer_s == pytest.approx(1.2 + 2.0)


@pytest.mark.attack("A14")
def test_requests_that_fail_everywhere_and_are_tried_once_eject_nobody_for_long() -> None:
    """Every third request fails where it comes first, and is not repeated. The others are served."""
    core, left_out = core_of(2), 0
    for number in range(3000):
        now_s = number / 10
        core.run_timers(now_s)
        found = core.pick(f"r{number}", TASK)
        assert found is not None
        if number % 3 == 0:
            core.failed(found.addr, now_s, request_id=f"r{number}")
            core.readmit_ordinary(now_s)
        else:
            core.succeeded(found.addr, None, now_s)
        core.release(f"r{number}")
        left_out += len(core.outliers)
    assert left_out < 0.02 * 3000


def test_who_alone_fails_is_ejected_though_some_requests_fail_everywhere() -> None:
    """One of four requests is bad at any replica; a0 fails the others, too."""
    core, chance = core_of(3), random.Random(2)
    for number in range(200):
        found = core.pick(f"r{number}", TASK)
        assert found is not None
        if found.addr == "a0" or chance.random() < 0.25:
            core.failed(found.addr, 0.0, request_id=f"r{number}")
            core.readmit_ordinary(0.0)
        else:
            core.succeeded(found.addr, None, 0.0)
        core.release(f"r{number}")
    assert core.outlier_state("a0") is OutlierState.EJECTED
    assert len(core.outliers) == 1


def test_once_the_others_fail_as_often_nobody_is_left_out() -> None:
    core = core_of(2)
    fail(core, "a0")
    assert picks(core) == {"a1"}
    core.failed("a1", 0.1)
    assert [each.addr for each in core.readmit_ordinary(0.1)] == ["a0"]
    assert picks(core) == {"a0", "a1"}


def health_of(outcomes: str) -> Health:
    """A replica's outcomes, in order: F failed, S served."""
    health = Health()
    for number, outcome in enumerate(outcomes):
        if outcome == "F":
            health.failed(f"r{number}")
        else:
            health.succeeded()
    return health


@pytest.mark.parametrize(
    ("outcomes", "keeps_failing"),
    [
        ("", False),
        ("FF", False),
        ("FFF", True),
        ("FFFS", False),
        ("SFFF", True),
        ("FFSFFSFSF", False),
        ("FFSFFSFSSF", True),
        ("FFSFFSFSSS", False),
        ("S" * 20 + "FFSFFSFFSFFSFFSF", True),
    ],
)
def test_three_in_a_row_or_more_than_half_of_ten_to_twenty_are_too_many(outcomes: str, keeps_failing: bool) -> None:
    assert health_of(outcomes).keeps_failing is keeps_failing


def test_a_success_that_is_withdrawn_is_the_last_one() -> None:
    health = health_of("SFS")
    health.withdraw_success()
    health.failed("x")
    assert (health.seen, health.failures, health.keeps_failing) == (3, 2, False)
    health.withdraw_success()
    health.withdraw_success()
    assert (health.seen, health.failures) == (2, 2)


def test_an_ejection_says_what_it_is_for() -> None:
    for outcomes, cause, reason in [
        ("FFFF", "it broke", "4 failures in a row, the last: it broke"),
        ("FFSFFSFSSF", "", "6 of its last 10 requests failed"),
    ]:
        health = health_of(outcomes)
        health.eject(5.0, 1.0, 60.0, cause)
        assert (health.reason, health.ejected_at_s, health.until_s) == (reason, 5.0, 6.0)
        assert (health.state, health.is_blocked, health.needs_probe) == (OutlierState.EJECTED, True, False)
    health.end_ejection()
    assert (health.state, health.is_blocked, health.needs_probe) == (OutlierState.PROBED, False, True)
    health.start_probe("r")
    health.eject(7.0, 1.0, 60.0)
    assert (health.reason, health.until_s, health.probe) == ("the request that probed it failed", 9.0, None)
    health.excuse("another")
    assert health.state is OutlierState.EJECTED
    health.excuse("r")
    assert (health.state, health.ejections) == (OutlierState.PROBED, 1)
    health.recover(8.0)
    assert (health.state, health.seen, health.is_blocked, health.needs_probe) == (OutlierState.FINE, 0, False, False)
    health.cancel_probe()
    assert not health.needs_probe
    health.eject(68.0, 1.0, 60.0)
    assert health.until_s == 70.0, "a minute has to pass, and more"
    health.recover(68.0)
    health.eject(128.5, 1.0, 60.0)
    assert health.until_s == 129.5


@pytest.mark.parametrize(
    ("outcomes", "others", "is_ejected"),
    [
        ("FFF", "", True),
        ("FFF", "SF", False),
        ("FFF", "SSF", True),
        ("FFF", "FFSF", False),
        ("FFFFFFFFFF", "FFSF", True),
        ("FFFFFFFFFF", "FFFF", False),
        ("SFFF", "SSSSSFFF", False),
        ("SFFF", "SSSSSSFF", True),
    ],
)
def test_who_fails_twice_as_often_as_the_others_stands_out_or_always_where_the_others_serve_some(
    outcomes: str, others: str, is_ejected: bool
) -> None:
    outliers: Outliers[Replica] = Outliers(1.0, 60.0)
    a, b, c = Replica("a", health_of(outcomes[:-1])), Replica("b", health_of(others)), Replica("c", health_of("SSSS"))
    outliers.ejected["c"] = c  # those that are ejected are not compared with
    assert outliers.failed(a, 20, 0.0, "", "x", [a, b, c]) is is_ejected
    assert list(outliers.ejected) == (["c", "a"] if is_ejected else ["c"])


def test_an_excuse_readmits_who_is_ejected_and_fails_no_more_too_often() -> None:
    outliers: Outliers[Replica] = Outliers(1.0, 60.0)
    a, b = Replica("a"), Replica("b", health_of("F"))
    for number in range(4):
        outliers.failed(a, 2, 0.0, "", f"r{number}")
    assert (outliers.excuse(a, "r0", 1.0), outliers.excuse(b, "r0", 1.0)) == (False, False)
    assert outliers.excuse(a, "r1", 1.0)
    assert (len(outliers), a.health.state, b.health.failures) == (0, OutlierState.FINE, 0)
    assert outliers.readmit_ordinary([a, b], 2.0) == []
    assert not outliers.forget("a")
    assert repr(outliers) == "Outliers(none)"


def test_ejections_end_one_after_the_other() -> None:
    outliers: Outliers[Replica] = Outliers(1.0, 60.0)
    a, b = Replica("a"), Replica("b")
    for replica, now_s in ((a, 5.0), (b, 5.5)):
        for _ in range(3):
            outliers.failed(replica, 20, now_s)
    assert outliers.next_end_s == 6.0
    assert outliers.end_ejections(6.0) == [a]
    assert outliers.next_end_s == 6.5
    assert outliers.end_ejections(6.5) == [b]
    assert outliers.next_end_s is None
    assert outliers.end_ejections(99.0) == []
    assert [outliers.update_panic(each, 20) for each in (2, 2, 11, 12)] == [True, False, False, True]
    assert not outliers.panics


_steps = st.lists(
    st.tuples(
        st.sampled_from(["fail", "fail", "fail", "succeed", "up", "down", "remove", "upsert", "time"]),
        st.integers(0, 11),
    ),
    max_size=120,
)


@given(_steps)
def test_ejections_never_take_a_pool_below_half_nor_more_than_their_part(steps: list[tuple[str, int]]) -> None:
    core, now_s = core_of(12), 0.0
    for verb, number in steps:
        addr = f"a{number}"
        match verb:
            case "fail":
                fail(core, addr, now_s)
            case "succeed":
                core.succeeded(addr, None, now_s)
            case "up":
                core.session_up(addr, now_s)
            case "down":
                core.session_down(addr, now_s)
            case "remove":
                core.remove(addr, now_s)
            case "upsert":
                core.upsert(info(number), now_s)
            case _:
                now_s += number
                core.run_timers(now_s)
        listed, serving = core.members.registered_count, core.members.pickable_count
        spared = [each for each in range(12) if core.outlier_state(f"a{each}") is not OutlierState.FINE]
        assert len(core.outliers) == len(spared)
        left = len(core.candidates())
        assert left <= serving
        assert left == serving or 2 * left >= listed
        assert serving == sum(core.members.serviceable(f"a{each}") for each in range(12))
        assert core.ejected_free_count == serving - left
        if serving:
            # Nobody waits for an ejection to end.
            tried = {f"a{each}" for each in range(12) if core.members.serviceable(f"a{each}")} - {addr}
            found = core.pick("picky", TASK, avoid=tried)
            assert (found is None) == core.all_avoided(tried)
            core.release("picky")
