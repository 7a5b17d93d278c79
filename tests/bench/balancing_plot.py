"""The picture of the balancing simulation: one panel for each pool, waiting over load, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from tests.bench.report import Row

_WIDTH, _HEIGHT = 760, 500
_PANEL_WIDTH, _PANEL_HEIGHT = 300, 170
_LEFT, _TOP, _STEP_X, _STEP_Y = 62, 58, 360, 228
#: The y axis, in seconds, by its powers of ten.
_LOWEST, _HIGHEST = -3, 3
#: What is drawn, in the order of the legend: policy, age of reports, name, colour and class. The last lies on the one
#: before it nearly everywhere, so it is dashed.
_LINES: Final = (
    ("random", 5.0, "random", "#a0a0a0", "line"),
    ("least-reported", 5.0, "least reported queue, 5 s old (vLLM-Omni)", "#d6453d", "line"),
    ("est-x", 1.0, "omni-discovery without credits", "#c98a00", "line"),
    ("credits", 1.0, "omni-discovery", "#1f7ae0", "line wide"),
    ("central", 0.0, "one central queue", "#2f9e5b", "line dashed"),
)
#: Readable on white and on black, as the page may be either.
_STYLE: Final = (
    "text{font:12px sans-serif;fill:#777}.title{font-weight:bold}.grid{stroke:#888;stroke-opacity:.25}"
    ".line{fill:none;stroke-width:2.2}.wide{stroke-width:4.5}.dashed{stroke-dasharray:5 5}"
)


def draw(rows: Sequence[Row]) -> str:
    """The SVG of the 99th percentiles in these rows."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        "<title>99th percentile of waiting for a slot, by load</title>",
        f"<style>{_STYLE}</style>",
    ]
    for number, (*_, name, colour, kind) in enumerate(_LINES):
        x, y = 20 + 250 * (number % 3), 16 + 18 * (number // 3)
        parts.append(f'<path class="{kind}" stroke="{colour}" d="M{x} {y - 4}h22"/>')
        parts.append(f'<text x="{x + 28}" y="{y}">{name}</text>')
    for column, hubs in enumerate((1, 4)):
        for line, slots in enumerate((1, 8)):
            chosen = [row for row in rows if (row["hubs"], row["slots"]) == (hubs, slots)]
            title = f"{hubs} hub{'s' * (hubs > 1)}, {slots} slot{'s' * (slots > 1)} each"
            parts += _panel(chosen, title, _LEFT + column * _STEP_X, _TOP + 10 + line * _STEP_Y)
    return "\n".join((*parts, "</svg>\n"))


def _panel(rows: Sequence[Row], title: str, left: int, top: int) -> list[str]:
    loads = sorted({row["load"] for row in rows})
    parts = [f'<text class="title" x="{left}" y="{top - 8}">{title}</text>']
    for power in range(_LOWEST, _HIGHEST + 1):
        y = top + _height(10.0**power)
        parts.append(f'<path class="grid" d="M{left} {y:.1f}h{_PANEL_WIDTH}"/>')
        label = f"{10.0**power:g} s" if power >= 0 else f"{10.0 ** (power + 3):g} ms"
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for load in loads:
        x = left + _across(load, loads)
        parts.append(f'<text x="{x:.1f}" y="{top + _PANEL_HEIGHT + 16}" text-anchor="middle">load {load:g}</text>')
    for policy, report_s, _, colour, kind in _LINES:
        found = {row["load"]: row["p99_s"] for row in rows if (row["policy"], row["report_s"]) == (policy, report_s)}
        points = [(left + _across(load, loads), top + _height(p99_s)) for load, p99_s in sorted(found.items())]
        radius = 5 if "wide" in kind else 2.5
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        parts.append(f'<path class="{kind}" stroke="{colour}" d="M{path}"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"/>' for x, y in points]
    return parts


def _across(load: float, loads: Sequence[float]) -> float:
    """How far right in a panel."""
    span = loads[-1] - loads[0]
    return 24 + (_PANEL_WIDTH - 48) * ((load - loads[0]) / span if span else 0.5)


def _height(seconds: float) -> float:
    """How far down in a panel."""
    power = min(_HIGHEST, max(_LOWEST, math.log10(max(seconds, 1e-9))))
    return _PANEL_HEIGHT * (_HIGHEST - power) / (_HIGHEST - _LOWEST)
