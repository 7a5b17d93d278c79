"""``python -m tests.mutants``: small changes to the pure cores, and whether the unit tests beside them notice."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

if os.environ.get("PYTHONHASHSEED") != "0":
    # The order of sets of texts decides what some tests see.
    arguments = [sys.executable, "-m", "tests.mutants", *sys.argv[1:]]
    os.execve(  # noqa: S606 - itself
        sys.executable, arguments, {**os.environ, "PYTHONHASHSEED": "0"}
    )

from tests.mutants.changes import Change, sample
from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.runner import ROOT, Verdict, judge
from tests.unit.repository.test_architecture import IMPURE, imports_of, tops

#: Folders of cores; the tests of one are those in the same folder of ``tests/unit``.
FOLDERS: Final = (
    "omni_discovery/balancing",
    "omni_discovery/records",
    "omni_discovery/registration",
    "omni_discovery/view",
    "omni_discovery/wire",
    "hub/request",
    "hub/pool",
    "hub/orchestrator",
    "hub/replicas",
    "stage_runtime/server",
    "stage_runtime/engine_loop",
    "stage_runtime/supervisor",
)


def cores_of(folder: str) -> list[str]:
    """The files of a folder that import nothing that waits, draws lots, reads a clock or talks."""
    names = sorted(str(path.relative_to(ROOT)) for path in (ROOT / folder).glob("*.py"))
    return [name for name in names if not tops(imports_of(name)) & IMPURE]


def judge_folder(folder: str, count: int, seed: int, files: Sequence[str]) -> list[Verdict]:
    """Judge drawn changes of a folder's cores, or of those among ``files``, and print those that survive."""
    names = [name for name in cores_of(folder) if not files or name in files]
    drawn = [change for name in names for change in sample(name, (ROOT / name).read_text(), count, seed)]
    if not drawn:
        return []
    verdicts: list[Verdict] = []

    def told(verdict: Verdict) -> None:
        if verdict.outcome == "survived" and verdict.change.name in EQUIVALENT:
            verdict = Verdict(verdict.change, "equivalent", verdict.tests)
        verdicts.append(verdict)
        if verdict.outcome == "survived":
            say(line_of(verdict.change))

    failing = judge(drawn, [f"tests/unit/{folder}"], told)
    for each in failing:
        say(f"fails without a change, so it is left out: {each}")
    return verdicts


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def line_of(change: Change) -> str:
    """Where a change is, and what it is."""
    return f"{change.path}:{change.lines.start} {change.function}: {change.before}  ->  {change.after}"


def table(verdicts: Iterable[Verdict]) -> list[str]:
    """A table in Markdown: for each folder, what became of its changes; the share is of those that can be noticed."""
    counts = Counter((str(Path(each.change.path).parent), each.outcome) for each in verdicts)
    folders = [folder for folder in FOLDERS if any(folder == there for there, _ in counts)]
    rows = [(f"`{folder}`", [counts[folder, outcome] for outcome in OUTCOMES]) for folder in folders]
    rows.append(("all", [sum(counts[folder, outcome] for folder in folders) for outcome in OUTCOMES]))
    head = ["| folder | noticed | of those that a test runs | not noticed | change nothing | run by no test |"]
    return [*head, "|---|---|---|---|---|---|", *(_row(name, *numbers) for name, numbers in rows)]


OUTCOMES: Final = ("noticed", "survived", "equivalent", "not run")


def _row(name: str, noticed: int, survived: int, equivalent: int, not_run: int) -> str:
    share = f"{100 * noticed / max(noticed + survived, 1):.0f} %"
    return f"| {name} | {noticed} | {share} | {survived} | {equivalent} | {not_run} |"


def main() -> int:
    """Judge the cores; print survivors and the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("files", nargs="*", help="only these cores")
    parser.add_argument("--count", type=int, default=10, help="changes of each file (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="which are drawn (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write every change and its outcome, as JSON")
    chosen = parser.parse_args()
    folders = [each for each in FOLDERS if not chosen.files or each in {str(Path(f).parent) for f in chosen.files}]
    verdicts: list[Verdict] = []
    for folder in folders:
        verdicts += judge_folder(folder, chosen.count, chosen.seed, chosen.files)
        if chosen.out:
            rows = [(*each.change.name, each.outcome, each.tests) for each in verdicts]
            chosen.out.write_text(json.dumps(rows, indent=1))
    say("\n".join(["", *table(verdicts)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
