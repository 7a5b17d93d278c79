"""The picture of a load test as SVG: latencies over time, and their distribution.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final
from xml.sax.saxutils import escape

from omni_discovery.commands.bench.figures import Seen
from omni_discovery.commands.bench.screen import shown_s
from omni_discovery.text import harmless

_WIDTH, _HEIGHT = 760, 330
_PANEL_WIDTH, _PANEL_HEIGHT = 300, 210
_TOP, _LEFTS = 70, (58, 430)
#: Of more requests than twice so many, the median and the slowest of each of so many parts of the time are drawn.
_MOST_PARTS: Final = 400
#: The distribution: its ticks, and where it ends.
_TICKS: Final = (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999)
_COLOURS: Final = {"first output": "#c98a00", "whole answer": "#1f7ae0"}
_FAILED, _REFUSED = "#d6453d", "#8a63d2"
#: Readable on white and on black, as the page may be either.
_STYLE: Final = (
    "text{font:12px sans-serif;fill:#777}.title{font-weight:bold}.grid{stroke:#888;stroke-opacity:.25}"
    ".line{fill:none;stroke-width:2.2}.dots{stroke-width:4;stroke-linecap:round;stroke-opacity:.6}"
)

_Point = tuple[float, float]


def draw_plot(seen: Sequence[Seen], seconds: float, title: str) -> str:
    """The SVG of these requests."""
    # The model's name is the hub's word.
    title = escape(harmless(title))
    whole = [each for each in seen if not each.failure]
    series = {
        "first output": [(each.due_s, each.first_s) for each in whole if each.first_s is not None],
        "whole answer": [(each.due_s, each.whole_s) for each in whole],
    }
    values = [value for points in series.values() for _, value in points]
    lowest = math.floor(math.log10(max(min(values, default=0.001), 1e-6)))
    highest = max(lowest + 1, math.ceil(math.log10(max(1e-6, *values)))) if values else lowest + 3

    def down(value: float) -> float:
        power = min(highest, max(lowest, math.log10(max(value, 1e-6))))
        return _TOP + _PANEL_HEIGHT * (highest - power) / (highest - lowest)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        f"<title>{title}</title>",
        f"<style>{_STYLE}</style>",
        f'<text x="{_LEFTS[0]}" y="16">{title}</text>',
        *_legend(seen),
    ]
    for left, name in zip(_LEFTS, ("latency, by when it was due", "percentiles"), strict=True):
        parts.append(f'<text class="title" x="{left}" y="{_TOP - 10}">{name}</text>')
        for power in range(lowest, highest + 1):
            y = down(10.0**power)
            parts.append(f'<path class="grid" d="M{left} {y:.1f}h{_PANEL_WIDTH}"/>')
            parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{shown_s(10.0**power)}</text>')
    return "\n".join((*parts, *_over_time(series, seen, seconds, down), *_distribution(series, down), "</svg>\n"))


def _legend(seen: Sequence[Seen]) -> list[str]:
    names = dict(_COLOURS)
    names |= {"failed": _FAILED} if any(each.failure and not each.is_refused for each in seen) else {}
    names |= {"refused (429)": _REFUSED} if any(each.is_refused for each in seen) else {}
    parts = []
    for number, (name, colour) in enumerate(names.items()):
        x = _LEFTS[0] + 130 * number
        parts.append(f'<circle cx="{x + 4}" cy="32" r="4" fill="{colour}"/><text x="{x + 14}" y="36">{name}</text>')
    return parts


def _over_time(
    series: dict[str, list[_Point]], seen: Sequence[Seen], seconds: float, down: Callable[[float], float]
) -> list[str]:
    left, span_s, bottom = _LEFTS[0], max(seconds, 1e-9), _TOP + _PANEL_HEIGHT
    parts = []
    for name, points in series.items():
        places = [(_PANEL_WIDTH * min(1.0, due_s / span_s), down(value)) for due_s, value in thinned(points, seconds)]
        path = "".join(f"M{left + x:.1f} {y:.1f}h0" for x, y in places)
        parts.append(f'<path class="dots" stroke="{_COLOURS[name]}" d="{path}"/>')
    # Those that were not answered have no latency: they stand below the axis, one mark for each moment that has any.
    unanswered = [each for each in seen if each.failure]
    marks = {(round(_PANEL_WIDTH * min(1.0, each.due_s / span_s), 1), each.is_refused) for each in unanswered}
    for at, is_refused in sorted(marks):
        y, colour = (bottom + 3, _REFUSED) if is_refused else (bottom + 10, _FAILED)
        parts.append(f'<path stroke="{colour}" d="M{left + at:.1f} {y}v6"/>')
    for part in (0.0, 0.5, 1.0):
        x = left + part * _PANEL_WIDTH
        label = shown_s(part * seconds) if part else "0"
        parts.append(f'<text x="{x:.1f}" y="{bottom + 30}" text-anchor="middle">{label}</text>')
    return parts


def thinned(points: Sequence[_Point], seconds: float) -> list[_Point]:
    """The points, or of too many the median and the slowest of each part of the time: nothing slow is left out."""
    if len(points) <= 2 * _MOST_PARTS:
        return [*points]
    parts: dict[int, list[_Point]] = {}
    for point in points:
        parts.setdefault(int(_MOST_PARTS * point[0] / max(seconds, 1e-9)), []).append(point)
    kept = []
    for _, inside in sorted(parts.items()):
        inside.sort(key=lambda point: point[1])
        kept += [inside[len(inside) // 2], inside[-1]]
    return kept


def _distribution(series: dict[str, list[_Point]], down: Callable[[float], float]) -> list[str]:
    left, bottom = _LEFTS[1], _TOP + _PANEL_HEIGHT
    most = max((len(points) for points in series.values()), default=0)
    ticks = [tick for tick in _TICKS if (1 - tick) * most >= 0.999] or [0.0]
    nines = max(1.0, math.log10(max(most, 1)))

    def across(part: float) -> float:
        # Each nine of a percentile takes the same room: slow answers are few, and what matters.
        return left + _PANEL_WIDTH * min(1.0, -math.log10(max(1.0 - part, 10.0**-nines)) / nines)

    parts = []
    for name, points in series.items():
        ordered = sorted(value for _, value in points)
        # One point for each place that can be told apart: the slowest that stands there.
        places = {round(across(rank / len(ordered)), 1): down(value) for rank, value in enumerate(ordered)}
        if not places:
            continue
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places.items())
        parts.append(f'<path class="line" stroke="{_COLOURS[name]}" d="M{path}"/>')
    for tick in ticks:
        x = across(tick)
        label = f"{100 * tick:g} %"
        parts.append(f'<path class="grid" d="M{x:.1f} {_TOP}v{_PANEL_HEIGHT}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 30}" text-anchor="middle">{label}</text>')
    return parts
