"""The bars of a spoken answer."""

from __future__ import annotations

from stage_runtime.demo.http_client import Reply
from stage_runtime.demo.waterfall import Span, bars, spans, waterfall

TIMINGS = {"hub_in": 0.1, "stage0.total": 0.4, "stage2.total": 0.5, "stage3.total": 0.4}


def reply(first_sound_s: float, seconds: float) -> Reply:
    return Reply("", b"", seconds, b"\0\0", 16000, first_sound_s, TIMINGS)


def test_each_stage_has_the_time_that_the_hub_tells_and_the_sound_the_clients() -> None:
    found = spans(reply(0.75, 1.1))
    assert [span.name for span in found] == ["thinker", "talker", "vocoder", "sound"]
    assert [(round(span.begin_s, 3), round(span.end_s, 3)) for span in found] == [
        (0.1, 0.5),
        (0.5, 1.0),
        (0.7, 1.1),
        (0.75, 1.1),
    ]


def test_a_bar_stands_at_its_time_and_the_shortest_is_seen() -> None:
    lines = list(bars("title", [Span("half", 0.5, 1.0), Span("none", 1.0, 1.0)], 1.0))
    assert lines[0] == "title"
    half, none = (line.split("|")[1] for line in lines[1:])
    assert half == " " * 24 + "█" * 24
    assert none == " " * 47 + "█"
    assert lines[1].endswith("|  500 to 1000 ms")


def test_both_figures_have_one_scale() -> None:
    lines = waterfall(reply(0.75, 1.1), reply(1.5, 2.2)).splitlines()
    assert len(lines) == 10
    assert lines[4].rindex("█") < lines[9].rindex("█")
