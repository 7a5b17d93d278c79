"""How long requests wait for a slot, on a virtual clock: ``python -m tests.bench.balancing``.

16 replicas, Poisson arrivals, lognormal service with a mean of 1 s and a squared coefficient of variation of 3.2,
messages that take 0.5 ms. *central* is one queue for all, which no system of several hubs can have. *omni-discovery*
is the shipped pool in each hub and the shipped credit book in each replica. *peer* sends each request at once to the
replica with the least reported queue, reports 5 s old; random and round robin take no heed of queues. The second table
has the shipped pool without credits, and compares ways to estimate a queue from old reports.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.bench import balancing_plot, report
from tests.bench.balancing_arrivals import Setting, arrivals, central_waits, push_waits
from tests.bench.balancing_simulation import Mode, OwnTimesHubs, Simulation

LOADS: Final = (0.7, 0.85, 0.95)
#: Below this the central queue's 99th percentile is a few messages, and a ratio to it says nothing.
_LEAST_S: Final = 0.02
_MODES: Final = {
    "credits": Mode(),
    "est": Mode(credits=False, knows_hubs=False),
    "est-x": Mode(credits=False),
    "own-x": Mode(credits=False, estimate=OwnTimesHubs),
    "est, records only": Mode(credits=False, piggyback=False, knows_hubs=False),
    "est-x, records only": Mode(credits=False, piggyback=False),
    "own-x, records only": Mode(credits=False, piggyback=False, estimate=OwnTimesHubs),
}
_PUSHED: Final = ("least-reported", "round-robin", "random")
#: The age of reports in the first table and the picture; the other rows are there to compare, and get fewer requests.
_MAIN_S: Final = 1.0
_FEWER: Final = 4


@dataclass(frozen=True, slots=True)
class Job:
    """One policy in one setting with one seed."""

    policy: str
    setting: Setting
    seed: int

    @property
    def is_main(self) -> bool:
        """Whether it is in the first table."""
        return self.policy in ("central", *_PUSHED) or (self.policy == "credits" and self.setting.report_s == _MAIN_S)


def waits_of(job: Job, count: int) -> list[float]:
    """How long each request waited."""
    requests = arrivals(job.setting, count if job.is_main else count // _FEWER, job.seed)
    if job.policy == "central":
        return central_waits(requests, job.setting)
    if job.policy in _PUSHED:
        return push_waits(requests, job.setting, job.policy, job.seed)
    return Simulation(job.setting, _MODES[job.policy], job.seed).run(requests)


def _jobs(seeds: int, loads: list[float]) -> Iterator[Job]:
    settings = [(load, slots, hubs) for slots in (1, 8) for hubs in (1, 4) for load in loads]
    for seed in range(1, seeds + 1):
        for load, slots, hubs in settings:
            for policy, report_s in _policies(slots, hubs):
                yield Job(policy, Setting(load, slots, hubs, report_s), seed)


def _policies(slots: int, hubs: int) -> Iterator[tuple[str, float]]:
    yield "central", 0.0
    for policy in _PUSHED:
        yield policy, 5.0
    for report_s in (0.1, 1.0, 5.0):
        if report_s == _MAIN_S or (slots, hubs) == (1, 4):
            yield "credits", report_s
        if hubs == 1:
            # Nobody else sends anything: the estimate is exact at any age.
            if report_s == _MAIN_S:
                yield "est-x", report_s
            continue
        for policy in _MODES:
            if policy != "credits" and (slots == 1 or "," not in policy):
                yield policy, report_s


def _row(job: Job, waits_s: list[float], central_p99_s: float) -> report.Row:
    p99_s = report.percentile(waits_s, 0.99)
    return {
        "slots": job.setting.slots,
        "hubs": job.setting.hubs,
        "load": job.setting.load,
        "policy": job.policy,
        "report_s": job.setting.report_s,
        "p50_s": round(report.percentile(waits_s, 0.5), 4),
        "p99_s": round(p99_s, 4),
        "p99_to_central": round(p99_s / central_p99_s, 2) if job.is_main and central_p99_s >= _LEAST_S else None,
    }


def measure(count: int, seeds: int, loads: list[float], processes: int) -> list[report.Row]:
    """Run everything; a row for each policy in each setting."""
    jobs = list(_jobs(seeds, loads))
    found: dict[Job, list[float]] = defaultdict(list)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for job, waits_s in zip(jobs, pool.imap(partial(waits_of, count=count), jobs), strict=True):
            found[Job(job.policy, job.setting, 0)] += waits_s
    central = {
        (job.setting.slots, job.setting.hubs, job.setting.load): report.percentile(waits_s, 0.99)
        for job, waits_s in found.items()
        if job.policy == "central"
    }
    return [
        _row(job, waits_s, central[job.setting.slots, job.setting.hubs, job.setting.load])
        for job, waits_s in found.items()
    ]


def _late_binding(rows: list[report.Row]) -> Iterator[report.Row]:
    """The first table: one line for each pool and load."""
    found: dict[Any, dict[str, report.Row]] = defaultdict(dict)
    for row in rows:
        if row["policy"] in ("central", *_PUSHED) or (row["policy"], row["report_s"]) == ("credits", _MAIN_S):
            found[row["slots"], row["hubs"], row["load"]][row["policy"]] = row
    for (slots, hubs, load), by in found.items():
        yield {
            "slots": slots,
            "hubs": hubs,
            "load": load,
            "central_p50_/_p99_s": f"{by['central']['p50_s']:.3f} / {by['central']['p99_s']:.3f}",
            "omni-discovery_p50_/_p99_s": f"{by['credits']['p50_s']:.3f} / {by['credits']['p99_s']:.3f}",
            "p99_to_central": by["credits"]["p99_to_central"],
            "peer_p99_s": by["least-reported"]["p99_s"],
            "peer_to_central": by["least-reported"]["p99_to_central"],
            "round_robin": by["round-robin"]["p99_to_central"],
            "random": by["random"]["p99_to_central"],
        }


def _estimates(rows: list[report.Row]) -> Iterator[report.Row]:
    """The second table: p99 in seconds by policy and age of the records."""
    found: dict[Any, dict[float, float]] = defaultdict(dict)
    for row in rows:
        if row["policy"] not in ("central", *_PUSHED):
            line = found[row["policy"], row["slots"], row["hubs"], row["load"]]
            line[row["report_s"]] = row["p99_s"]
    for (policy, slots, hubs, load), by in sorted(found.items(), key=lambda item: item[0][1:]):
        ages = {f"@{report_s:g}_s": by.get(report_s) for report_s in (0.1, 1.0, 5.0)}
        yield {"policy": policy, "slots": slots, "hubs": hubs, "load": load, **ages}


def main() -> None:
    """Simulate, print two tables, write all as JSON and the picture as SVG."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=120_000, help="of each seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--loads", nargs="+", type=float, default=list(LOADS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="path of the JSON file to write")
    parser.add_argument("--plot", type=Path, help="path of the SVG file to write")
    arguments = parser.parse_args()
    began_s = time.monotonic()
    rows = measure(arguments.requests, arguments.seeds, arguments.loads, arguments.processes)
    report.show("waiting for a slot, reports 1 s old (the peer's: 5 s)", list(_late_binding(rows)))
    report.show("p99 of waiting in s, with credits and without, by the age of the records", list(_estimates(rows)))
    took_s = round(time.monotonic() - began_s)
    report.write(
        arguments.out, {"requests": arguments.requests, "seeds": arguments.seeds, "took_s": took_s, "rows": rows}
    )
    if arguments.plot is not None:
        arguments.plot.parent.mkdir(parents=True, exist_ok=True)
        arguments.plot.write_text(balancing_plot.draw(rows))


if __name__ == "__main__":
    main()
