"""The picture of a load test."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from omni_discovery.commands.bench.figures import Seen
from omni_discovery.commands.bench.plot import draw_plot, thinned

WHOLE = [
    Seen(due_s, due_s, due_s + 0.05 + due_s / 100, {"text": due_s + 0.02})
    for due_s in (number / 10 for number in range(100))
]


def elements(svg: str, name: str) -> list[ElementTree.Element]:
    tree = ElementTree.fromstring(svg)  # noqa: S314 - it is our own
    return [each for each in tree.iter() if each.tag.endswith(f"}}{name}")]


def test_the_picture_is_xml_with_a_dot_for_each_latency_and_a_line_for_each_distribution() -> None:
    svg = draw_plot(WHOLE, 10.0, "a <b> & c\x1b")
    dots = [each.get("d", "").count("M") for each in elements(svg, "path") if each.get("class") == "dots"]
    assert dots == [100, 100]
    assert len([each for each in elements(svg, "path") if each.get("class") == "line"]) == 2
    assert [each.text for each in elements(svg, "title")] == ["a <b> & c_"]


def test_all_that_is_drawn_lies_in_the_picture() -> None:
    svg = draw_plot(
        [*WHOLE, Seen(10.5, 10.5, 11.0, failure="cut off"), Seen(0.0, 0.0, 99.0, {"text": 1e-9})], 10.0, "t"
    )
    places = [(float(each.get("cx", 0)), float(each.get("cy", 0))) for each in elements(svg, "circle")]
    for path in elements(svg, "path"):
        places += [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path.get("d", ""))]
    assert all(0 <= x <= 760 and 0 <= y <= 330 for x, y in places)


def test_failures_and_refusals_have_marks_of_their_own_only_where_there_are_some() -> None:
    assert "refused" not in draw_plot(WHOLE, 10.0, "t")
    failed = Seen(1.0, 1.0, 2.0, failure="cut off", status=200)
    refused = Seen(2.0, 2.0, 2.0, failure="429 overloaded", status=429)
    svg = draw_plot([*WHOLE, failed, refused], 10.0, "t")
    assert {"failed", "refused (429)"} <= {each.text for each in elements(svg, "text")}
    assert len([each for each in elements(svg, "path") if (each.get("d") or "").endswith("v6")]) == 2


def test_of_many_points_nothing_slow_is_left_out() -> None:
    points = [(number / 1000, 0.1) for number in range(100_000)]
    points[77_777] = (77.777, 9.0)
    kept = thinned(points, 100.0)
    assert len(kept) <= 801
    assert (77.777, 9.0) in kept
    assert thinned(points[:10], 100.0) == points[:10]


@pytest.mark.parametrize(
    "seen", [[], [Seen(0.0, 0.0, 1.0, failure="not reachable")], WHOLE[:1]], ids=["0", "failed", "1"]
)
def test_a_test_with_next_to_nothing_has_a_picture_too(seen: list[Seen]) -> None:
    assert draw_plot(seen, 0.0, "t").endswith("</svg>\n")
