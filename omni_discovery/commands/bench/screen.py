"""A load test for people: its lines while it runs, and at its end.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from omni_discovery.commands.bench.figures import BenchSummary, Seen, Spread, percentile
from omni_discovery.text import one_line

#: How modalities are called in the table of first outputs.
_FIRST_NAMES: Final = {"text": "first text", "audio": "first sound", "image": "first picture"}
#: Live percentiles are of the last so many answers.
LATEST: Final = 500


def shown_s(seconds: float) -> str:
    """Seconds with three digits and a fitting unit."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms" if seconds < 0.1 else f"{1000 * seconds:.0f} ms"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"


def live_lines(
    seconds: float, answered: int, refused: int, failed: int, waiting: int, latest: Sequence[Seen]
) -> tuple[str, str]:
    """How it goes: counts since the start; and the latencies of the latest that have ended, empty for none.

    Together they would not fit into 80 columns.
    """
    wholes = sorted(each.whole_s for each in latest if not each.failure)
    firsts = sorted(each.first_s for each in latest if not each.failure and each.first_s is not None)
    parts = [f"{seconds:5.0f} s", f"{answered} answered"]
    parts += [f"{refused} refused"] if refused else []
    parts += [f"{failed} failed"] if failed else []
    parts += [f"{waiting} on their way"]
    latencies = [
        f"{name} p50 {shown_s(percentile(values, 0.5))} p99 {shown_s(percentile(values, 0.99))}"
        for name, values in (("first", firsts), ("whole", wholes))
        if values
    ]
    return "  ".join(parts), "  ".join(latencies)


def summary_lines(summary: BenchSummary) -> list[str]:
    """The figures as lines of 80 columns at most, but for doubts and failures."""
    counts = f"{summary.answered} of {summary.requests} in {shown_s(summary.seconds)}"
    lines = [f"answered   {counts}: {summary.requests_per_s:.4g} requests/s"]
    if summary.refused:
        lines.append(f"refused    {summary.refused} with 429: the hub had no room for them")
    for failure, count in summary.failed.items():
        message = one_line(summary.messages.get(failure, ""))
        lines.append(f"failed     {count} {failure}{': ' if message else ''}{message}")
    if summary.unfinished:
        lines.append(
            f"unfinished {summary.unfinished}, the oldest after {shown_s(summary.oldest_s)}; not in the table below"
        )
    if summary.unsent:
        lines.append(f"not sent   {summary.unsent}, which were due before the end")
    if summary.without_output:
        lines.append(f"empty      {summary.without_output} answers had no output")
    rates = _rates(summary)
    if rates:
        lines.append(f"output     {', '.join(rates)}")
    return [*lines, *_table(summary), _client_line(summary), *(f"note: {doubt}" for doubt in summary.doubts)]


def _rates(summary: BenchSummary) -> list[str]:
    rates = (
        (summary.tokens_per_s, "tokens/s"),
        (summary.characters_per_s, "characters/s"),
        (summary.pictures_per_s, "pictures/s"),
        (summary.sound_s_per_s, "s of sound/s"),
    )
    return [f"{rate:.4g} {name}" for rate, name in rates if rate]


def _table(summary: BenchSummary) -> list[str]:
    rows: list[tuple[str, Spread | None]] = [("first output", summary.first)]
    if len(summary.firsts) > 1:
        rows += [(_FIRST_NAMES.get(name, f"first {name}"), spread) for name, spread in summary.firsts.items()]
    rows += [("between outputs", summary.between), ("whole answer", summary.whole)]
    shown = [(name, spread) for name, spread in rows if spread is not None]
    if not shown:
        return []
    lines = ["", f"{'':<16}" + "".join(f"{name:>11}" for name in ("p50", "p90", "p99", "max"))]
    for name, spread in shown:
        values = (spread.p50_s, spread.p90_s, spread.p99_s, spread.max_s)
        lines.append(f"{name:<16}" + "".join(f"{shown_s(value):>11}" for value in values))
    return [*lines, ""]


def _client_line(summary: BenchSummary) -> str:
    lag, late = summary.client.loop_lag, summary.late
    parts = [f"{100 * summary.client.busy_share:.0f} % of a core"]
    parts += [f"loop {shown_s(lag.p99_s)} late"] if lag is not None else []
    parts += [f"sending {shown_s(late.p99_s)} late"] if late is not None else []
    return f"this client: {', '.join(parts)}{' (p99)' if len(parts) > 1 else ''}"
