"""``python -m tests.support.loaded``: all tests again and again, beside processes that take every core.

Each run is the lanes of ``make test`` beside ``stress-ng --cpu 4``. A line tells how it ended, how long it took,
and which tests failed in their lane and which of them alone, too; what a run printed is in a file.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_STRESS: Final = ("stress-ng", "--cpu", "4", "--quiet")
_FAILED_ALONE: Final = "failed alone, too:"


def main(arguments: Sequence[str]) -> int:
    """Run the tests so many times; return 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10, help="how many times (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="the folder of what is printed")
    given = parser.parse_args(arguments)
    if shutil.which(_STRESS[0]) is None:
        parser.error("stress-ng is missing: install it (Debian: apt-get install stress-ng)")
    given.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for number in range(1, given.runs + 1):
        log = given.out / f"loaded-{number}.log"
        began_s = time.monotonic()
        passed = _run(log)
        failed += not passed
        minutes = (time.monotonic() - began_s) / 60
        told = "passed" if passed else "FAILED"
        sys.stdout.write(f"run {number} of {given.runs}: {told}, {minutes:.0f} min, {_described(log)}; {log}\n")
        sys.stdout.flush()
    return int(failed > 0)


def _run(log: Path) -> bool:
    stress = subprocess.Popen(_STRESS, stdin=subprocess.DEVNULL)
    try:
        with log.open("w") as file:
            command = [sys.executable, "-m", "tests.support.lanes"]
            return not subprocess.call(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    finally:
        stress.terminate()
        stress.wait()


def _described(log: Path) -> str:
    """The load at the end, and what failed in its lane, as far as it was printed."""
    text = log.read_text(errors="replace")
    in_lane = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", text.partition("all lanes:")[0], re.MULTILINE)
    again = text.partition(_FAILED_ALONE)[2].strip().splitlines()
    load = os.getloadavg()[2]
    return f"load {load:.1f}, failed in their lane: {in_lane or 'none'}, alone, too: {again or 'none'}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
