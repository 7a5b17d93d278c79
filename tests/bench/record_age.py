"""What it costs that records are late: ``python -m tests.bench.record_age``.

Among 1000 replicas each writes its load to etcd every 5 s at most (the write budget). The simulation of
tests.bench.balancing, with the shipped pool and the shipped credit book, runs the same requests of four hubs with
records of several ages, from ones that are written five times a second, which no budget allows, to none after the
first. A pick may be worse in two ways: the request waits longer, or it starts where more others run, while a slot
elsewhere was free.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from tests.bench import report
from tests.bench.balancing_arrivals import Setting, arrivals
from tests.bench.balancing_simulation import Mode, Simulation

_NEVER_S: Final = 1e6
AGES_S: Final = (0.2, 3.0, _NEVER_S)
#: On the virtual clock; fewer requests where load is low.
_LONGEST_S: Final = 1000.0


def _settings(replicas: int) -> Iterator[Setting]:
    # One hub knows all that it has sent: records tell it nothing.
    for slots in (1, 8):
        for load in (0.05, 0.5, 0.85, 0.95):
            for age_s in AGES_S:
                yield Setting(load, slots, 4, age_s, replicas)


def row_of(setting: Setting, requests: int) -> report.Row:
    """One run of so many requests."""
    world = Simulation(setting, Mode(), 1)
    count = min(requests, int(_LONGEST_S * setting.load * setting.slots * setting.replicas))
    waits_s = world.run(arrivals(setting, count, 1))
    p50_s, p99_s = (report.percentile(waits_s, share) for share in (0.5, 0.99))
    return {
        "replicas": setting.replicas,
        "slots": setting.slots,
        "load": setting.load,
        "requests": count,
        "records": "none" if setting.report_s == _NEVER_S else f"each {setting.report_s:g} s",
        "wait_p50_ms": round(1000 * p50_s, 2),
        "wait_p99_ms": round(1000 * p99_s, 2),
        "crowd_mean": round(statistics.fmean(world.crowds), 3),
        "crowd_p99": report.percentile(world.crowds, 0.99),
    }


def main() -> None:
    """Run all, print a table, write all as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, help="path of the JSON file to write")
    arguments = parser.parse_args()
    settings = list(_settings(arguments.replicas))
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        rows = []
        for row in pool.imap(partial(row_of, requests=arguments.requests), settings):
            rows.append(row)
            report.console.print(row)
    report.show("waits and crowds by the age of the records", rows)
    report.write(arguments.out, {"requests": arguments.requests, "rows": rows})


if __name__ == "__main__":
    main()
