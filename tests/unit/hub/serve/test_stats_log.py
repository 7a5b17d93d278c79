"""The lines of ``--log-stats``."""

from __future__ import annotations

from hub.metrics import HubMetrics
from hub.serve.stats_log import StatsLog


def test_the_lines_say_what_ended_since_the_last_ones_and_what_each_stage_has() -> None:
    """1. two requests ended, one failed, one runs; 2. that one is still all there is; 3. nothing is"""
    metrics, log = HubMetrics(), StatsLog()
    metrics.requests.labels("ok").inc(2)
    metrics.requests.labels("ReplicaLostError").inc()
    metrics.in_flight.set(1)
    for stage in ("10", "2"):
        metrics.pickable.labels(stage).set(3)
        metrics.waiting.labels(stage).set(5)
    stages = ["stage.stats stage=2 pickable=3 waiting=5", "stage.stats stage=10 pickable=3 waiting=5"]
    assert log.lines(metrics.registry.collect()) == ["hub.stats in_flight=1 ended=3 ReplicaLostError=1 ok=2", *stages]
    assert log.lines(metrics.registry.collect()) == ["hub.stats in_flight=1 ended=0", *stages]
    metrics.in_flight.set(0)
    assert log.lines(metrics.registry.collect()) == []
    metrics.requests.labels("ok").inc()
    assert log.lines(metrics.registry.collect())[0] == "hub.stats in_flight=0 ended=1 ok=1"
