"""A load test for people."""

from __future__ import annotations

from array import array

import pytest

from omni_discovery.commands.bench.figures import ClientLoad, Seen, Tally, spread_of
from omni_discovery.commands.bench.screen import live_lines, shown_s, summary_lines


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.00012, "0.12 ms"), (0.0123, "12.3 ms"), (0.25, "250 ms"), (1.0, "1 s"), (12.34, "12.3 s"), (120.4, "120 s")],
)
def test_seconds_have_three_digits_and_their_unit(seconds: float, shown: str) -> None:
    assert shown_s(seconds) == shown


def test_the_live_line_says_only_what_there_is() -> None:
    assert live_lines(2.0, 0, 0, 0, 3, []) == ("    2 s  0 answered  3 on their way", "")
    seen = [Seen(0.0, 0.0, 0.2, {"text": 0.1}, status=200), Seen(0.0, 0.0, 9.0, failure="cut off")]
    counts, latencies = live_lines(2.0, 1, 4, 1, 0, seen)
    assert "4 refused  1 failed" in counts
    assert latencies == "first p50 100 ms p99 100 ms  whole p50 200 ms p99 200 ms"


def test_each_live_line_fits_into_80_columns_after_a_day_under_load() -> None:
    seen = [Seen(0.0, 0.0, 1000.123, {"text": 999.987}, status=200)]
    counts, latencies = live_lines(86_400.0, 9_999_999, 99_999, 99_999, 9999, seen)
    assert (len(counts) <= 80, len(latencies) <= 72) == (True, True), "the second is indented"


def test_the_figures_fit_into_80_columns() -> None:
    tally = Tally()
    for number in range(2000):
        seen = Seen(number, number, number + 0.1234, {"text": number + 0.01, "audio": number + 0.05}, sound_s=1.0)
        tally.add(seen, array("d", [0.0123]))
    tally.add(Seen(0.0, 0.0, 0.1, failure="429 overloaded", status=429), array("d"))
    tally.add(Seen(0.0, 0.0, 0.1, failure="503 stage_unavailable", status=503), array("d"), "nobody\nthere")
    summary = tally.summary(2000.0, ClientLoad(0.5, spread_of([0.001])), waiting_since_s=[1.0], unsent=2)
    lines = summary_lines(summary)
    notes = [line for line in lines if line.startswith("note: ")]
    assert max(len(line) for line in lines if line not in notes) <= 80
    text = "\n".join(lines)
    assert "refused    1 with 429" in text
    assert "failed     1 503 stage_unavailable: nobody there" in text
    assert "unfinished 1, the oldest after 1999 s" in text
    assert "not sent   2" in text
    assert [line.split("  ")[0] for line in lines if " ms " in line and "late" not in line] == [
        "first output",
        "first text",
        "first sound",
        "between outputs",
        "whole answer",
    ]
    assert len(notes) == 1


def test_without_an_answer_there_is_no_table() -> None:
    assert summary_lines(Tally().summary(1.0, ClientLoad(0.0, None))) == [
        "answered   0 of 0 in 1 s: 0 requests/s",
        "this client: 0 % of a core",
    ]
