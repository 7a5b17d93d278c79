"""Rates and lengths from the lists that hubs give, and what is unknown rather than zero."""

from __future__ import annotations

import pytest

from omni_discovery.commands.top.traffic import WINDOW_S, Pace, Traffic, quantile, read_traffic, slowest
from omni_discovery.receipts.receipt import ReceiptLine

NOW = 1000.0


def line(name: str, received_at: float, took_s: float | None, *went: tuple[str, float | None]) -> ReceiptLine:
    replicas, spans = [each for each, _ in went], [span for _, span in went]
    return ReceiptLine(request_id=name, received_at=received_at, took_s=took_s, replicas=replicas, spans_s=spans)


def test_each_replica_has_the_pace_of_its_own_work_and_a_stage_that_of_all() -> None:
    lines = [
        line("a", NOW - 10, 2.0, ("0/0", 1.0), ("1/0", 0.5)),
        line("b", NOW - 10, 2.0, ("0/1", 3.0), ("1/0", 0.7)),
        line("c", NOW - 10, 2.0, ("0/0", None), ("0/1", 2.0)),
    ]
    traffic = read_traffic([lines], 100, NOW, known=1)
    assert traffic.of_replica("0/0") == Pace(1 / WINDOW_S, 1.0, 1.0)
    assert traffic.of_replica("0/1") == Pace(2 / WINDOW_S, 2.0, 3.0)
    assert traffic.of_stage(0).per_s == pytest.approx(3 / WINDOW_S)
    assert (traffic.of_stage(0).p50_s, traffic.of_stage(0).p99_s) == (2.0, 3.0)


def test_what_no_hub_tells_is_unknown_and_what_all_tell_nothing_of_is_zero() -> None:
    assert Traffic().of_replica("0/0") == Pace()
    assert read_traffic([], 100, NOW, known=1).of_stage(0) == Pace()
    assert read_traffic([[]], 100, NOW, known=2).of_replica("0/0") == Pace(), "the other hub may use it"
    assert read_traffic([[]], 100, NOW, known=1).of_replica("0/0") == Pace(0.0)


def test_work_that_ended_long_ago_or_has_not_ended_does_not_count() -> None:
    old = line("a", NOW - WINDOW_S - 5, 1.0, ("0/0", 1.0))
    running = line("b", NOW - 5, None, ("0/0", 1.0))
    of_another_clock = line("c", NOW + 500, 1.0, ("0/0", 1.0))
    assert read_traffic([[old, running, of_another_clock]], 100, NOW, known=1).replicas == {}


def test_a_full_list_says_nothing_of_the_time_before_it() -> None:
    lines = [line(str(number), NOW - 4, 2.0, ("0/0", 1.0)) for number in range(8)]
    assert read_traffic([lines], 8, NOW, known=1).of_replica("0/0").per_s == pytest.approx(2.0)
    assert read_traffic([lines], 9, NOW, known=1).of_replica("0/0").per_s == pytest.approx(8 / WINDOW_S)


def test_rates_of_hubs_add_up() -> None:
    lines = [line("a", NOW - 5, 1.0, ("0/0", 1.0))]
    assert read_traffic([lines, lines], 100, NOW, known=2).of_replica("0/0").per_s == pytest.approx(2 / WINDOW_S)


def test_a_line_of_an_older_hub_has_no_lengths() -> None:
    older = ReceiptLine(request_id="a", received_at=NOW - 2, took_s=1.0, replicas=["0/0"])
    assert read_traffic([[older]], 100, NOW, known=1).replicas == {}


def test_quantiles_are_values_that_were_measured() -> None:
    assert quantile([], 0.5) is None
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([float(value) for value in range(1, 101)], 0.99) == 99.0


def test_the_slowest_come_first_and_those_under_way_not_at_all() -> None:
    lines = [line("a", NOW, 1.0), line("b", NOW, None), line("c", NOW, 9.0)]
    assert [each.request_id for each in slowest([lines, [line("d", NOW, 5.0)]], 2)] == ["c", "d"]
