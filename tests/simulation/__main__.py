"""``python -m tests.simulation [--seeds FROM:TO | --seed N]``."""

from __future__ import annotations

import os
import sys

if os.environ.get("PYTHONHASHSEED") != "0":
    # The order of sets of texts is part of a run.
    os.execve(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})

from tests.simulation import virtual_time  # noqa: I001 - before the packages

import argparse

from tests.simulation.mistakes import MISTAKES
from tests.simulation.plan import Plan, draw
from tests.simulation.world import Result, run_apart


def run_seeds(seeds: list[int], *, is_quiet: bool = False) -> int:
    """Run seeds; return how many broke a rule."""
    took_s, total_s, failed = 0.0, 0.0, 0
    for seed in seeds:
        plan = draw(seed)
        result = run_apart(plan)
        took_s += result.used_s
        total_s += result.simulated_s
        if result.violations or not is_quiet:
            tell(plan, result)
        failed += bool(result.violations)
    print(
        f"{len(seeds)} seeds, {failed} failed, {total_s / 3600:.2f} cluster-hours in {took_s:.1f} s of one core: "
        f"{total_s / took_s:.0f} in an hour"
    )
    return failed


def tell(plan: Plan, result: Result) -> None:
    """One line for a run, and one for each broken rule."""
    kinds = len({fault.kind for fault in plan.faults})
    print(
        f"seed {plan.seed}: {result.digest} hubs={plan.hubs} stages={plan.stages} faults={len(plan.faults)}/{kinds} "
        f"{result.ended} {result.simulated_s:.0f} s in {result.used_s:.2f} s, {result.callbacks} callbacks",
        flush=True,
    )
    for violation in result.violations:
        print("   ", violation)


def judge_the_judge(seeds: list[int], names: list[str]) -> int:
    """Make each mistake; print which seed and rule has found it. Return how many were not found."""
    missed = 0
    for name in names:
        for seed in seeds:
            result = run_apart(draw(seed), name)
            if result.violations:
                rules = sorted({violation.partition(":")[0] for violation in result.violations})
                print(f"| {name} | {seed} | {', '.join(rules)} |", result.violations[0][:150], flush=True)
                break
        else:
            missed += 1
            print(f"| {name} | none of {len(seeds)} | |", flush=True)
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seed", type=int, help="one seed, such as a failure names")
    parser.add_argument("--seeds", default="0:20", help="FROM:TO")
    parser.add_argument("--mistakes", nargs="*", help="judge the judge: all mistakes, or those named")
    options = parser.parse_args()
    first, last = map(int, options.seeds.split(":"))
    seeds = list(range(first, last)) if options.seed is None else [options.seed]
    if options.mistakes is not None:
        return 1 if judge_the_judge(seeds, options.mistakes or list(MISTAKES)) else 0
    return 1 if run_seeds(seeds) else 0


if __name__ == "__main__":
    sys.exit(main())
