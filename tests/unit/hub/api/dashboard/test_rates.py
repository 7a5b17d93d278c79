"""Rates and quantiles of the last seconds: what is not known is None, and never 0."""

from __future__ import annotations

from math import inf

import pytest

from hub.api.dashboard.model import Spread
from hub.api.dashboard.rates import WINDOW_S, RateWindow, failed_in, quantile
from hub.metrics import HubCounts, HubMetrics, Tally

BOUNDS = (1.0, 2.0, 4.0, inf)


def tally(*counts: float) -> Tally:
    return Tally(BOUNDS, counts)


@pytest.mark.parametrize(
    ("counts", "part", "expected"),
    [
        ((0, 0, 0, 0), 0.5, None),
        ((4, 4, 4, 4), 0.5, 1.0),
        ((0, 4, 4, 4), 0.5, 1.5),
        ((0, 2, 4, 4), 0.75, 3.0),
        ((0, 0, 0, 4), 0.5, 4.0),
        ((0, 0, 4, 4), 1.0, 4.0),
    ],
)
def test_a_quantile_lies_within_its_bucket(counts: tuple[int, ...], part: float, expected: float | None) -> None:
    assert quantile(Tally(), tally(*counts), part) == expected


def test_what_was_there_before_the_window_does_not_count() -> None:
    assert quantile(tally(9, 9, 9, 9), tally(9, 9, 11, 11), 0.5) == 3.0


def test_nothing_is_known_after_one_reading_and_all_after_two() -> None:
    window = RateWindow()
    assert window.requests() == Spread()
    window.add(100.0, HubCounts(request=tally(0, 0, 0, 0)))
    assert (window.length_s, window.requests(), window.failed_per_s()) == (0.0, Spread(), None)
    window.add(102.0, HubCounts(request=tally(0, 4, 4, 4), outcomes={"ok": 4, "OverloadedError": 1, "cancelled": 9}))
    assert window.requests() == Spread(per_s=2.0, p50_s=1.5, p99_s=pytest.approx(1.99))
    assert window.failed_per_s() == 0.5
    assert window.first_output() == Spread(per_s=0.0)
    assert window.stage(7, "generate") == Spread(per_s=0.0)


def test_old_readings_leave_and_a_pause_begins_anew() -> None:
    window = RateWindow()
    for second in range(40):
        window.add(float(second), HubCounts())
    assert window.length_s == WINDOW_S
    window.add(1000.0, HubCounts(request=tally(5, 5, 5, 5)))
    assert window.requests() == Spread()


def test_the_counts_are_those_of_the_hubs_metrics() -> None:
    metrics = HubMetrics()
    metrics.requests.labels("ok").inc(3)
    metrics.requests.labels("EngineFailedError").inc()
    metrics.count_retry(0, resumed=True)
    metrics.count_retry(1, resumed=False)
    metrics.observe_stage(1, {"generate": 0.15})
    counts = metrics.counts()
    assert counts.outcomes == {"ok": 3, "EngineFailedError": 1}
    assert (counts.retries, counts.continued, failed_in(counts)) == (2, 1, 1)
    assert counts.stages.keys() == {(1, "generate")}
    seen = counts.stages[1, "generate"]
    assert (seen.bounds[-1], seen.counts[-1]) == (inf, 1)
    assert 0.1 < (quantile(Tally(), seen, 0.5) or 0) < 0.2
