"""What a hub reports, and when it is to be seen at once."""

from __future__ import annotations

import asyncio

from msgspec import UNSET

from hub.config import PoolOptions
from hub.pool.versions import Pools, make_pools
from hub.replicas.health import HealthReporter
from omni_discovery.balancing.policies import build_load_balancer_factory
from omni_discovery.records.health import MOST_TROUBLES, UnreadAnswers
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from tests.support.registry import eventually


def pools_of(count: int) -> Pools:
    pools = make_pools([0], build_load_balancer_factory("least-load"), PoolOptions())
    for number in range(count):
        address = f"tcp://h:{number}"
        record = ReplicaInfo(address, address, 0, ReplicaStatus.UP, 0, 0.0, 0.0, replica_id=number, epoch=number + 1)
        pools.of(record).core.upsert(record, 0.0)
        pools.of(record).core.session_up(address, 0.0)
    return pools


def test_an_ejection_is_reported_with_until_when_and_why_and_announced_once() -> None:
    pools, announced = pools_of(3), []
    reporter = HealthReporter(pools)
    reporter.on_change = lambda: announced.append(reporter.report)
    reporter.refresh(1.0, 1001.0)
    assert (reporter.report.troubles, len(announced)) == ([], 1), "the first report is announced, whatever it says"
    (pool,) = pools.of_stage(0)
    assert [pool.core.failed("tcp://h:1", 10.0, "engine: it broke") for _ in range(3)] == [False, False, True]
    reporter.refresh(10.25, 1010.25)
    (trouble,) = reporter.report.troubles
    assert (trouble.name, trouble.epoch, trouble.kind, trouble.is_picked) == ("0/1", 2, "ejected", False)
    assert (trouble.since, trouble.until) == (1010.0, 1011.0)
    assert trouble.reason == "3 failures in a row, the last: engine: it broke"
    reporter.refresh(10.5, 1010.5)
    assert len(announced) == 2
    pool.core.run_timers(11.0)
    reporter.refresh(11.0, 1011.0)
    assert reporter.report.troubles[0].kind == "probed"
    assert pool.core.succeeded("tcp://h:1", None, 12.0)
    reporter.refresh(12.0, 1012.0)
    assert reporter.report.troubles == []
    assert len(announced) == 4
    reporter.refresh(41.0, 1041.0)
    assert len(announced) == 4
    reporter.refresh(42.0, 1042.0)
    assert len(announced) == 5, "in a busy registry no other beat may be due"


def test_a_lost_session_is_reported_and_a_new_replica_has_time_for_its_first() -> None:
    pools = pools_of(1)
    reporter = HealthReporter(pools)
    (pool,) = pools.of_stage(0)
    pool.core.session_down("tcp://h:0", 20.0, "no heartbeats")
    young = ReplicaInfo("tcp://h:9", "tcp://h:9", 0, ReplicaStatus.UP, 0, 0.0, 0.0, replica_id=9, epoch=9)
    pool.core.upsert(young, 20.0)
    reporter.refresh(21.0, 1021.0)
    (trouble,) = reporter.report.troubles
    assert (trouble.name, trouble.kind, trouble.since, trouble.reason) == ("0/0", "no-session", 1020.0, "no heartbeats")
    reporter.refresh(24.0, 1024.0)
    assert [trouble.name for trouble in reporter.report.troubles] == ["0/0", "0/9"]
    pool.core.session_up("tcp://h:0", 25.0)
    pool.core.session_up("tcp://h:9", 25.0)
    reporter.refresh(25.0, 1025.0)
    assert reporter.report.troubles == []


def test_an_ejection_that_is_ignored_is_reported_as_one() -> None:
    pools = pools_of(1)
    reporter = HealthReporter(pools)
    (pool,) = pools.of_stage(0)
    for _ in range(3):
        pool.core.failed("tcp://h:0", 10.0)
    reporter.refresh(10.0, 1010.0)
    assert [(each.kind, each.is_picked) for each in reporter.report.troubles] == [("ejected", True)]


def test_counts_alone_are_announced_now_and_then_and_failures_of_another_stage_at_once() -> None:
    reporter, announced = HealthReporter(pools_of(1)), []
    reporter.on_change = lambda: announced.append(reporter.report.failed)
    for second in range(12):
        reporter.recent.count_end(float(second))
        reporter.recent.count_failure(0, "EngineFailedError", float(second))
        reporter.refresh(float(second), 1000.0 + second)
    assert announced == [1, 6, 11]
    reporter.recent.count_failure(1, "EngineFailedError", 12.0)
    reporter.refresh(12.0, 1012.0)
    assert announced[-1] == 13
    assert reporter.report.requests == 12


def test_a_report_names_a_bounded_number_of_replicas() -> None:
    pools = pools_of(100)
    (pool,) = pools.of_stage(0)
    for number in range(100):
        pool.core.session_down(f"tcp://h:{number}", 1.0, "x" * 5000)
    reporter = HealthReporter(pools)
    reporter.refresh(2.0, 1002.0)
    assert (len(reporter.report.troubles), reporter.report.more) == (MOST_TROUBLES, 100 - MOST_TROUBLES)
    assert max(len(each.reason) for each in reporter.report.troubles) <= 160


async def test_it_reports_by_itself_until_it_is_closed() -> None:
    reporter = HealthReporter(pools_of(1))
    reporter.recent.count_end(asyncio.get_running_loop().time())
    reporter.start()
    try:
        await eventually("a report", lambda: reporter.report.requests)
    finally:
        reporter.close()
        reporter.close()


def test_a_replica_that_takes_several_times_as_long_as_the_others_is_slow() -> None:
    """Nobody is slow alone, after few requests, or for long after the last one."""
    pools = pools_of(3)
    reporter = HealthReporter(pools)
    (pool,) = pools.of_stage(0)

    def slow_at(now_s: float) -> list[str]:
        reporter.refresh(now_s, 1000.0 + now_s)
        assert all(trouble.kind == "slow" and trouble.is_picked for trouble in reporter.report.troubles)
        return [trouble.name for trouble in reporter.report.troubles]

    for _ in range(5):
        pool.core.succeeded("tcp://h:2", 3.0, 10.0)
    assert slow_at(11.0) == [], "no other is known"
    for _ in range(4):
        pool.core.succeeded("tcp://h:0", 0.5, 10.0)
    assert slow_at(11.0) == [], "the other has served too few"
    for number in (0, 1, 1, 1, 1, 1):
        pool.core.succeeded(f"tcp://h:{number}", 0.5, 10.0)
    assert slow_at(12.0) == ["0/2"]
    assert reporter.report.troubles[0].reason == (
        "its requests take 3 s each, those of the other replicas of its stage 0.5 s"
    )
    assert slow_at(400.0) == []


def test_what_waits_and_what_was_refused_is_reported_by_stage() -> None:
    pools = pools_of(1)
    reporter = HealthReporter(pools)
    reporter.refresh(1.0, 1001.0)
    assert reporter.report.loads == []
    reporter.recent.count_refusal(0, 5.0)
    reporter.recent.count_refusal(0, 7.0)
    reporter.recent.count_refusal(None, 8.0)
    reporter.refresh(9.0, 1009.0)
    hub, stage = reporter.report.loads or []
    assert (hub.stage_id, hub.refused, hub.refused_at) == (None, 1, 1008.0)
    assert (stage.stage_id, stage.waiting, stage.refused, stage.refused_at) == (0, 0, 2, 1007.0)


def test_answers_that_lie_unread_for_ten_seconds_are_reported_and_announced() -> None:
    """Two of three lie for long enough; the report says so at once, and no more once they are read."""
    reporter, announced = HealthReporter(pools_of(1)), []
    reporter.on_change = lambda: announced.append(reporter.report)
    reporter.refresh(20.0, 1020.0)
    reporter.unread_since_s = lambda: {"a": 12.0, "b": 15.0, "c": 25.0, "d": float("inf")}
    reporter.refresh(26.0, 1026.0)
    assert reporter.report.unread == UnreadAnswers(count=2, since=1012.0)
    assert announced[-1] is reporter.report
    reporter.unread_since_s = lambda: {"c": 26.0}
    reporter.refresh(26.5, 1026.5)
    assert reporter.report.unread is UNSET
    assert announced[-1] is reporter.report
