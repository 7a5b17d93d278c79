"""What receipts cost a hub: ``python -m tests.bench.receipts [--pairs 60] [--out FILE]``.

One hub with two echo stages writes receipts and writes none in turns, now the one first and now the other
(``tests.bench.switched_hub``). Figures are the processor time of the hub's loop per whole chat, and the ratio with /
without of the turns that stand next to each other: its median, and the interval that holds the true median with 95 %.
An interval that holds 1 means: not told apart. The ring is full before the first turn.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.bench import report
from tests.bench.before_after import interval
from tests.bench.orchestrator import http_rate
from tests.bench.switched_hub import SAID
from tests.support.hub import Hub
from tests.support.processes import wait_for

_ROOT: Final = Path(__file__).resolve().parents[2]
_DEPLOY: Final = """
model: echo-two
stages:
  - {{stage_id: 0, engine: echo, engine_args: {{capacity: 32}}, runtime: {{num_replicas: {0}}}, final_output: none}}
  - {{stage_id: 1, engine: echo, engine_args: {{capacity: 32}}, runtime: {{num_replicas: {0}}}, final_output: text}}
"""
_RECEIPTS: Final = 2000


class _SwitchedHub(Hub):
    def __init__(self, folder: Path, replicas: int) -> None:
        file = folder / "deploy.yaml"
        file.write_text(_DEPLOY.format(replicas))
        arguments = ["--deploy-config", str(file), "--receipts", str(_RECEIPTS)]
        module, variables = "tests.bench.switched_hub", {"PYTHONPATH": str(_ROOT)}
        super().__init__(folder, arguments, module=module, variables=variables)
        self._writes = True

    def switch(self, *, writes: bool) -> None:
        """Have receipts written from now on, or none."""
        if writes is not self._writes:
            said = self.text.count(SAID[writes])
            os.kill(self.process.pid, signal.SIGUSR2)
            wait_for("the hub to switch", lambda: self.text.count(SAID[writes]) > said)
            self._writes = writes

    def loop_ns(self) -> int:
        """Processor time of the loop's thread so far; by the scheduler, which counts finer than clock ticks."""
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0])


def _turn(hub: _SwitchedHub, at_once: int, requests: int, *, writes: bool) -> float:
    """Microseconds of processor time per request."""
    hub.switch(writes=writes)
    before_ns = hub.loop_ns()
    asyncio.run(http_rate(hub.url, at_once, requests))
    return (hub.loop_ns() - before_ns) / 1000 / requests


def measure(replicas: int, at_once: int, pairs: int, requests: int) -> report.Row:
    """One row: without and with receipts, and their ratio."""
    with TemporaryDirectory() as folder:
        hub = _SwitchedHub(Path(folder), replicas)
        try:
            hub.wait_ready()
            asyncio.run(http_rate(hub.url, at_once, _RECEIPTS + 1000))
            turns: list[tuple[float, float]] = []
            for number in range(pairs):
                order = (True, False) if number % 2 else (False, True)
                seen = {writes: _turn(hub, at_once, requests, writes=writes) for writes in order}
                turns.append((seen[False], seen[True]))
        finally:
            hub.stop()
    ratios = [with_us / without_us for without_us, with_us in turns]
    low, high = interval(ratios)
    return {
        "replicas": replicas,
        "at_once": at_once,
        "pairs": pairs,
        "without_us": round(statistics.median(without_us for without_us, _ in turns)),
        "with_us": round(statistics.median(with_us for _, with_us in turns)),
        "ratio": round(statistics.median(ratios), 4),
        "from": round(low, 4),
        "to": round(high, 4),
    }


def main() -> None:
    """Measure, print the table, write it as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--replicas", nargs="+", type=int, default=[2])
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--out", type=Path, help="path of the JSON file to write")
    arguments = parser.parse_args()
    rows = [measure(each, arguments.at_once, arguments.pairs, arguments.requests) for each in arguments.replicas]
    report.show("receipts: the hub's processor time per chat, two echo stages", rows)
    report.write(arguments.out, {"machine": report.machine(), "receipts": rows})


if __name__ == "__main__":
    main()
