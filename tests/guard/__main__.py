"""``python -m tests.guard [--record]``: count the instructions of the hot paths, and compare them with the baseline."""

from __future__ import annotations

import argparse
import sys

from tests.guard.baseline import Baseline, advice, compare, nearest, read, record
from tests.guard.count import count, environment


def main() -> int:
    """Print a table in Markdown; 1 if a path has risen."""
    parser = argparse.ArgumentParser(prog="python -m tests.guard", description=__doc__)
    parser.add_argument("--record", action="store_true", help="make what is counted now the baseline of this Python")
    arguments = parser.parse_args()
    made = Baseline(environment(), count().plain)
    if arguments.record:
        record(made)
    baseline = nearest(read(), made.environment)
    rows = compare(baseline, made.environment, made.instructions)
    lines = ["| path | baseline | now | |", "|---|---|---|---|"]
    lines += [f"| {row.name} | {row.before:,} | {row.now:,} | {row.rise:+.1%} |" for row in rows]
    risen = [row for row in rows if row.has_risen]
    sys.stdout.write("\n".join([*lines, *([advice(baseline, made.environment)] if risen else []), ""]))
    return 1 if risen else 0


if __name__ == "__main__":
    sys.exit(main())
