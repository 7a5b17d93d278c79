"""``python -m tests.simulation``: runs seeds, one plan from a file, or mistakes made on purpose; see ``--help``."""

from __future__ import annotations

import os
import sys

if os.environ.get("PYTHONHASHSEED") != "0":
    # The order of sets of texts is part of a run.
    arguments = [sys.executable, "-m", "tests.simulation", *sys.argv[1:]]
    os.execve(  # noqa: S606 - itself
        sys.executable, arguments, {**os.environ, "PYTHONHASHSEED": "0"}
    )

from tests.simulation import virtual_time  # noqa: F401, I001 - before the packages

import argparse
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from tests.simulation.mistakes import MISTAKES
from tests.simulation.plan import Plan, draw, stretched
from tests.simulation.shrink import shrink
from tests.simulation.world import Result, run_apart

REGRESSIONS = Path(__file__).parent / "regressions"


def say(*lines: str) -> None:
    """Print lines at once."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def rules_of(result: Result) -> list[str]:
    """The rules that a run has broken."""
    return sorted({violation.partition(":")[0] for violation in result.violations})


def run_plans(plans: list[Plan], jobs: int, *, is_quiet: bool) -> int:
    """Run plans; print those that broke a rule, and all unless ``is_quiet``. Return how many broke one."""
    took_s, total_s, failed = 0.0, 0.0, 0
    for plan, result in _in_parallel(plans, jobs):
        took_s, total_s = took_s + result.used_s, total_s + result.simulated_s
        if result.violations or not is_quiet:
            say(_line_of(plan, result), *(f"    {each}" for each in result.violations))
        failed += bool(result.violations)
    say(
        f"{len(plans)} runs of {_commit()}, {failed} failed: {total_s / 3600:.2f} cluster-hours in {took_s:.1f} s of"
        f" one core, {total_s / max(took_s, 1e-9):.0f} in an hour"
    )
    return failed


def _in_parallel(plans: list[Plan], jobs: int) -> Iterator[tuple[Plan, Result]]:
    # The threads only wait for children.
    with ThreadPoolExecutor(jobs) as threads:
        yield from zip(plans, threads.map(run_apart, plans), strict=True)


def _line_of(plan: Plan, result: Result) -> str:
    kinds = len({fault.kind for fault in plan.faults})
    ends = " ".join(f"{how}={count}" for how, count in result.ended.items())
    return (
        f"seed {plan.seed}: digest={result.digest} hubs={plan.hubs} stages={plan.stages} faults={len(plan.faults)} of"
        f" {kinds} kinds, {ends}; {result.simulated_s:.0f} s in {result.used_s:.2f} s"
    )


def _commit() -> str:
    try:
        found = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    except OSError:
        return "no commit"
    return found.stdout.strip() or "no commit"


def judge_the_judge(plans: list[Plan], names: list[str], jobs: int) -> int:
    """Make each mistake; print which seed and which rules have found it. Return how many were not found."""
    missed = 0
    for name in names:
        for plan, result in _in_batches(plans, name, jobs):
            if result.violations:
                rules = ", ".join(rules_of(result))
                say(f"| {name} | {plan.seed} | {rules} | {result.violations[0][:120]}")
                break
        else:
            missed += 1
            say(f"| {name} | none of {len(plans)} | |")
    return missed


def _in_batches(plans: list[Plan], mistake: str, jobs: int) -> Iterator[tuple[Plan, Result]]:
    with ThreadPoolExecutor(jobs) as threads:
        for start in range(0, len(plans), jobs):
            batch = plans[start : start + jobs]
            yield from zip(batch, threads.map(lambda plan: run_apart(plan, mistake), batch), strict=True)


def shrink_and_save(plan: Plan, mistake: str) -> int:
    """Shrink a plan that breaks a rule; print what is left as JSON."""
    rules = set(rules_of(run_apart(plan, mistake)))
    if not rules:
        say(f"seed {plan.seed} breaks no rule")
        return 1
    smallest = shrink(plan, lambda each: bool(rules & set(rules_of(run_apart(each, mistake)))))
    text = msgspec.json.format(msgspec.json.encode(smallest), indent=1).decode()
    say(text)
    say(f"seed {plan.seed}: {len(smallest.faults)} of {len(plan.faults)} faults and {len(smallest.asks)} of "
          f"{len(plan.asks)} requests break {sorted(rules)}")  # fmt: skip
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="one seed, such as a failure names")
    parser.add_argument("--seeds", default="0:20", metavar="FROM:TO")
    parser.add_argument("--hours", type=float, default=0.0, help="stretch each run to so long, by quiet times")
    parser.add_argument("--plan", type=Path, help="a plan as --shrink prints it")
    parser.add_argument("--regressions", action="store_true", help="the plans in tests/simulation/regressions")
    parser.add_argument("--shrink", action="store_true", help="print the smallest plan that breaks the same rule")
    parser.add_argument("--mistake", default="", help="with --shrink: with this mistake in the packages")
    parser.add_argument("--mistakes", nargs="*", help="judge the judge: all mistakes, or those named")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--quiet", action="store_true", help="print only runs that break a rule")
    options = parser.parse_args()
    if options.regressions:
        plans = [msgspec.json.decode(path.read_bytes(), type=Plan) for path in sorted(REGRESSIONS.glob("*.json"))]
    elif options.plan is not None:
        plans = [msgspec.json.decode(options.plan.read_bytes(), type=Plan)]
    else:
        first, last = map(int, options.seeds.split(":"))
        plans = [draw(seed) for seed in ([options.seed] if options.seed is not None else range(first, last))]
        if options.hours:
            plans = [stretched(plan, options.hours * 3600) for plan in plans]
    if options.mistakes is not None:
        return 1 if judge_the_judge(plans, options.mistakes or list(MISTAKES), options.jobs) else 0
    if options.shrink:
        return shrink_and_save(plans[0], options.mistake)
    return 1 if run_plans(plans, options.jobs, is_quiet=options.quiet) else 0


if __name__ == "__main__":
    sys.exit(main())
