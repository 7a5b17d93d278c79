"""What receipts cost a hub: ``python -m tests.bench.receipts [--pairs 15] [--out FILE]``.

Two hubs with two echo stages each are alike but for ``--receipts``: one keeps them, one none (``--receipts 0``). They
stay up, and are asked in turns, now the one first and now the other. Figures are the hub's processor time per whole
chat, and the ratio with / without of the turns that stand next to each other: its median, and the interval that holds
the true median with 95 %. An interval that holds 1 means: not told apart.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.bench import report
from tests.bench.before_after import interval
from tests.bench.orchestrator import http_rate, resident_mib
from tests.support.hub import Hub

_DEPLOY: Final = """
model: echo-two
stages:
  - {{stage_id: 0, engine: echo, engine_args: {{capacity: 32}}, runtime: {{num_replicas: {0}}}, final_output: none}}
  - {{stage_id: 1, engine: echo, engine_args: {{capacity: 32}}, runtime: {{num_replicas: {0}}}, final_output: text}}
"""


def cpu_ns(pid: int) -> int:
    """Processor time of all threads of a process so far; by the scheduler, which counts finer than clock ticks."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads)


def _turn(hub: Hub, at_once: int, requests: int) -> float:
    """Microseconds of processor time per request."""
    before_ns = cpu_ns(hub.process.pid)
    asyncio.run(http_rate(hub.url, at_once, requests))
    return (cpu_ns(hub.process.pid) - before_ns) / 1000 / requests


def measure(replicas: int, at_once: int, pairs: int, requests: int) -> report.Row:
    """One row: without and with receipts, and their ratio."""
    with ExitStack() as stack:
        hubs = {}
        for name, count in (("without", "0"), ("with", "10000")):
            folder = Path(stack.enter_context(TemporaryDirectory()))
            hubs[name] = Hub.of_yaml(folder, _DEPLOY.format(replicas), "--receipts", count)
            stack.callback(hubs[name].stop)
        for hub in hubs.values():
            hub.wait_ready()
            asyncio.run(http_rate(hub.url, at_once, 2 * requests))
        turns: list[dict[str, float]] = []
        for number in range(pairs):
            order = sorted(hubs, reverse=number % 2 == 0)
            turns.append({name: _turn(hubs[name], at_once, requests) for name in order})
        ratios = [each["with"] / each["without"] for each in turns]
        low, high = interval(ratios)
        return {
            "replicas": replicas,
            "at_once": at_once,
            "pairs": pairs,
            "without_us": round(statistics.median(each["without"] for each in turns)),
            "with_us": round(statistics.median(each["with"] for each in turns)),
            "ratio": round(statistics.median(ratios), 4),
            "from": round(low, 4),
            "to": round(high, 4),
            "more_mib": round(resident_mib(hubs["with"].process.pid) - resident_mib(hubs["without"].process.pid), 1),
        }


def main() -> None:
    """Measure, print the table, write it as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--replicas", nargs="+", type=int, default=[2])
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--out", type=Path, help="path of the JSON file to write")
    arguments = parser.parse_args()
    rows = [measure(each, arguments.at_once, arguments.pairs, arguments.requests) for each in arguments.replicas]
    report.show("receipts: the hub's processor time per chat, two echo stages", rows)
    report.write(arguments.out, {"machine": report.machine(), "receipts": rows})


if __name__ == "__main__":
    main()
