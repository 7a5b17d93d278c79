"""What hubs count: only as far as it can be true, and so that Prometheus sees each increase."""

from __future__ import annotations

import pytest

from hub.config import PoolOptions
from hub.metrics import HubMetrics
from hub.pool.versions import make_pools
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
