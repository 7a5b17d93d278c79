"""The picture of growth: one panel for each kind of path, cost over size, both by powers of ten, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from tests.bench.report import Row

_WIDTH: Final = 760
_PANEL_WIDTH, _PANEL_HEIGHT = 380, 170
_LEFT, _TOP, _STEP_Y = 62, 30, 240
_COLOURS: Final = ("#1f7ae0", "#d6453d", "#2f9e5b", "#c98a00", "#8a5cd0", "#777777")
_TITLES: Final = {
    "picks": "a pick, by replicas",
    "registry": "the registry's work, by replicas",
    "streams": "pieces and requests, by streams",
    "hubs": "what other hubs cost, by hubs",
}
#: Readable on white and on black, as the page may be either.
_STYLE: Final = (
    "text{font:12px sans-serif;fill:#777}.title{font-weight:bold}.grid{stroke:#888;stroke-opacity:.25}"
    ".line{fill:none;stroke-width:2.2}.dashed{stroke-dasharray:5 5}"
)


def draw(rows: Sequence[Row], unit: str) -> str:
    """The SVG of these rows of tests.bench.growth. What must grow with the size is dashed."""
    groups = list(dict.fromkeys(row["group"] for row in rows))
    height = _TOP + _STEP_Y * len(groups)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{unit}, by size</title>",
        f"<style>{_STYLE}</style>",
    ]
    for number, group in enumerate(groups):
        parts += _panel([row for row in rows if row["group"] == group], f"{_TITLES[group]}: {unit}", number)
    return "\n".join((*parts, "</svg>\n"))


def _panel(rows: Sequence[Row], title: str, number: int) -> list[str]:
    top = _TOP + number * _STEP_Y
    costs = [cost for row in rows for cost in row["costs"]]
    lowest, highest = math.floor(math.log10(min(costs))), math.ceil(math.log10(max(costs)))
    sizes = rows[0]["sizes"]

    def x(size: float) -> float:
        span = math.log10(sizes[-1] / sizes[0])
        return _LEFT + 14 + (_PANEL_WIDTH - 28) * math.log10(size / sizes[0]) / span

    def y(cost: float) -> float:
        return top + _PANEL_HEIGHT * (highest - math.log10(cost)) / (highest - lowest)

    parts = [f'<text class="title" x="{_LEFT}" y="{top - 10}">{title}</text>']
    for power in range(lowest, highest + 1):
        parts.append(f'<path class="grid" d="M{_LEFT} {y(10.0**power):.1f}h{_PANEL_WIDTH}"/>')
        label = f"{10**power:,}".replace(",", " ")
        parts.append(f'<text x="{_LEFT - 6}" y="{y(10.0**power) + 4:.1f}" text-anchor="end">{label}</text>')
    for size in sizes:
        label = f"{size:,}".replace(",", " ")
        parts.append(f'<text x="{x(size):.1f}" y="{top + _PANEL_HEIGHT + 16}" text-anchor="middle">{label}</text>')
    for line, row in enumerate(rows):
        colour = _COLOURS[line % len(_COLOURS)]
        kind = "line dashed" if row["must"] else "line"
        points = [(x(size), y(cost)) for size, cost in zip(sizes, row["costs"], strict=True)]
        path = "L".join(f"{left:.1f} {down:.1f}" for left, down in points)
        parts.append(f'<path class="{kind}" stroke="{colour}" d="M{path}"/>')
        parts += [f'<circle cx="{left:.1f}" cy="{down:.1f}" r="3" fill="{colour}"/>' for left, down in points]
        legend_x, legend_y = _LEFT + _PANEL_WIDTH + 16, top + 14 + 20 * line
        parts.append(f'<path class="{kind}" stroke="{colour}" d="M{legend_x} {legend_y - 4}h22"/>')
        parts.append(f'<text x="{legend_x + 28}" y="{legend_y}">{row["path"]}</text>')
    return parts
