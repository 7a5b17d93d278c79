"""What hubs count: only as far as it can be true, and so that Prometheus sees each increase."""

from __future__ import annotations

import asyncio

import pytest

from hub.config import PoolOptions
from hub.metrics import HubMetrics
from hub.pool.stage_pool import StagePool
from hub.pool.versions import Pools, make_pools
from omni_discovery.balancing.policies import RoundRobinBalancer
from omni_discovery.errors import RecordError
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from omni_discovery.view.table import Delta, View


def value(metrics: HubMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


@pytest.mark.attack("E9")
def test_a_count_that_no_request_can_have_does_not_spoil_the_counter() -> None:
    metrics = HubMetrics()
    for tokens in (3, -1, 1 << 63, 1 << 25, 4):
        metrics.count_tokens(0, {"completion_tokens": tokens})
    assert value(metrics, "omni_hub_tokens_total", stage="0", type="completion") == 7


@pytest.mark.parametrize("name", ["requests_refused", "session_losses", "retries", "continuations"])
def test_the_counters_of_each_stage_are_there_from_0_on(name: str) -> None:
    """Of one that begins at 6, Prometheus sees no increase, and no alert fires."""
    metrics = HubMetrics()
    metrics.watch(make_pools([0, 1], RoundRobinBalancer, PoolOptions()), lambda: False)
    assert [value(metrics, f"omni_hub_{name}_total", stage=stage) for stage in ("0", "1")] == [0, 0]


def test_a_refusal_is_counted_at_the_stage_that_had_no_room_or_at_none() -> None:
    metrics = HubMetrics()
    for stage_id in (1, 1, None):
        metrics.count_refusal(stage_id)
    assert value(metrics, "omni_hub_requests_refused_total", stage="1") == 2
    assert value(metrics, "omni_hub_requests_refused_total", stage="") == 1


def test_changes_of_the_view_are_counted_and_a_key_that_can_not_be_read_is_shown_while_it_is_there() -> None:
    """1. two replicas come; one of them changes while a key comes that can't be read
    2. that one goes, and so does the key
    """
    metrics = HubMetrics()
    first, second = (ReplicaInfo("i", "o", 0, ReplicaStatus.UP, 0, 0.0, 0.0, replica_id=each) for each in (1, 2))
    bad = RecordError("/omni/v1/test/replicas/0/3", "no JSON")
    metrics.count_changes(View(), Delta(added=(first, second)))
    metrics.count_changes(View(bad={bad.key: bad}), Delta(updated=(first,), bad=(bad,)))
    assert value(metrics, "omni_hub_view_unreadable_keys") == 1
    metrics.count_changes(View(), Delta(removed=(first,)))
    assert value(metrics, "omni_hub_view_unreadable_keys") == 0
    changes = ("added", "updated", "removed")
    assert [value(metrics, "omni_hub_view_changes_total", change=each) for each in changes] == [2, 1, 1]


@pytest.mark.attack("N7")
def test_a_length_that_no_stage_can_take_does_not_spoil_the_sum() -> None:
    """Twice 1e308 would be infinite, and stay so until the hub is started again."""
    metrics = HubMetrics()
    for seconds in (2.0, 1e308, 1e308, float("inf"), float("nan"), -1.0, 3.0):
        metrics.observe_stage(0, {"generate": seconds})
    labels = {"stage": "0", "part": "generate"}
    assert metrics.registry.get_sample_value("omni_hub_stage_seconds_sum", labels) == 5.0
    assert metrics.registry.get_sample_value("omni_hub_stage_seconds_count", labels) == 2


class Series:
    """The metrics of a hub whose registry lists what the test says, at a time of its own."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.metrics = HubMetrics(lambda: self.now_s)
        self.pool = StagePool(0, RoundRobinBalancer(), now=lambda: self.now_s)
        self.metrics.watch(Pools([self.pool]), lambda: False)

    def register(self, replica_id: int) -> None:
        addr = f"tcp://h:{replica_id}"
        self.pool.core.upsert(
            ReplicaInfo(addr, addr, 0, ReplicaStatus.UP, 0, 0.0, 0.0, replica_id, epoch=1), self.now_s
        )

    def leave(self, replica_id: int) -> None:
        self.pool.core.remove(f"tcp://h:{replica_id}", self.now_s)

    def fail(self, replica_id: int) -> None:
        self.metrics.count_failure("0", f"0/{replica_id}", "EngineFailedError")

    async def shown(self) -> list[str]:
        """The replicas with a series, as a scrape finds them."""
        lines = (await self.metrics.exposition.own()).splitlines()
        found = [line for line in lines if line.startswith("omni_hub_request_failures_total{")]
        return [line.partition('replica="')[2].partition('"')[0] for line in found]


@pytest.mark.attack("N5")
async def test_the_series_of_a_replica_goes_some_minutes_after_it_has_left() -> None:
    """1. two replicas fail requests; 2. one leaves: its last value stays for a scrape or more; 3. minutes later it goes
    4. one that comes back in between keeps its series
    """
    series = Series()
    for replica_id in (1, 2, 3):
        series.register(replica_id)
        series.fail(replica_id)
    series.metrics.count_failure("0", "", "DeadlineExceededError")
    series.leave(2)
    series.leave(3)
    assert await series.shown() == ["0/1", "0/2", "0/3", ""]
    series.now_s = 500.0
    series.register(3)
    assert await series.shown() == ["0/1", "0/2", "0/3", ""]
    series.now_s = 601.0
    assert await series.shown() == ["0/1", "0/3", ""]


@pytest.mark.attack("N5")
async def test_a_replica_that_comes_under_ever_new_ids_leaves_a_bounded_number_of_series() -> None:
    """Whether anybody reads them or not: 5000 ids, one after the other, in less than the time that they are kept."""
    series = Series()
    series.register(0)
    series.fail(0)
    for replica_id in range(1, 5001):
        series.register(replica_id)
        series.fail(replica_id)
        series.leave(replica_id)
    stored = len(next(iter(series.metrics.failures.collect())).samples)
    assert stored < 1200, "with a sample for when each was created"
    shown = await series.shown()
    assert (len(shown), shown[0], shown[-1]) == (257, "0/0", "0/5000")


@pytest.mark.attack("N5")
async def test_an_exposition_is_rendered_beside_the_loop_and_shows_the_moment_it_was_taken() -> None:
    series = Series()
    series.fail(1)
    rendering = asyncio.create_task(series.metrics.exposition.own())
    await asyncio.sleep(0)
    series.fail(1)
    text = await rendering
    assert 'omni_hub_request_failures_total{outcome="EngineFailedError",replica="0/1",stage="0"} 1.0' in text
    assert text.count("# HELP omni_hub_replicas_registered ") == 1
