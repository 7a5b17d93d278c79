"""``python -m tests.simulation [--seeds FROM:TO | --seed N]``."""

from __future__ import annotations

import os
import sys

if os.environ.get("PYTHONHASHSEED") != "0":
    # The order of sets of texts is part of a run.
    os.execve(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})

from tests.simulation import virtual_time  # noqa: I001 - before the packages

import argparse

from tests.simulation.plan import draw
from tests.simulation.world import run


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", default="0:20")
    options = parser.parse_args()
    first, last = map(int, options.seeds.split(":"))
    seeds = range(first, last) if options.seed is None else [options.seed]
    began_s, total_s, failed = virtual_time.used_s(), 0.0, 0
    for seed in seeds:
        at_s = virtual_time.used_s()
        plan = draw(seed)
        result = run(plan)
        took_s = virtual_time.used_s() - at_s
        total_s += result.simulated_s
        kinds = len({fault.kind for fault in plan.faults})
        print(f"seed {seed}: {result.digest} hubs={plan.hubs} stages={plan.stages} faults={len(plan.faults)}/{kinds} "
              f"{result.ended} {result.simulated_s:.0f} s in {took_s:.2f} s, {result.callbacks} callbacks", flush=True)
        for violation in result.violations:
            print("   ", violation)
        failed += bool(result.violations)
    took_s = virtual_time.used_s() - began_s
    print(f"{len(seeds)} seeds, {failed} failed, {total_s / 3600:.2f} cluster-hours in {took_s:.1f} s: "
          f"{total_s / took_s:.0f} cluster-hours in an hour of one core")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
