"""Write the locks: `make lock`. Each compose/lock-*.in holds pins; the lock-*.txt beside it holds them with hashes.

A new version is written into the `.in` file by hand; this looks up the hashes of exactly those versions. Locks name no
index: who installs says where from.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

COMPOSE = Path(__file__).resolve().parent
KINDS = ("build", "cpu", "gpu", "test", "audit", "omni-cpu")
HOW = ("--no-deps", "--universal", "--python-version", "3.11", "--generate-hashes", "--no-header", "--no-annotate")


def main() -> int:
    """Return the exit code."""
    for kind in KINDS:
        pins, lock = COMPOSE / f"lock-{kind}.in", COMPOSE / f"lock-{kind}.txt"
        command = [sys.executable, "-m", "uv", "--no-config", "pip", "compile", "--quiet", *HOW, str(pins)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            print(f"{lock.name} stays as it was; what went wrong is above.", file=sys.stderr)
            return 1
        lock.write_text(f"# Written by `make lock` from {pins.name}.\n{done.stdout}", encoding="utf-8")
        print(f"{lock.name}: {done.stdout.count('==')} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
