"""``python -m tests.support.lanes [PYTEST ARGUMENTS]``: all tests, in three lanes that run at the same time.

Most tests wait for something most of the time. The first lane is printed as it goes, the others when all have ended.
A test that fails while the other lanes take their share of the machine is run once more when all have ended: what is
judged is the test with nothing beside it. The last lines name what failed in its lane and passed alone, and what failed
again.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

#: They take about as long as one another.
LANES: Final = (
    ("tests/integration/api", "tests/integration/replica", "tests/integration/registry"),
    (
        "tests/unit",
        "tests/contract",
        "tests/integration/hub",
        "tests/integration/connectors",
        "tests/integration/test_examples.py",
        "tests/simulation",
        "tests/linearizability",
    ),
    # Of a speaking model, the short form alone; `make omni-test` runs the others.
    (
        "tests/guard",
        "tests/gpu",
        "tests/fault",
        "tests/e2e",
        "--ignore-glob=tests/e2e/test_vllm_omni*.py",
    ),
)
#: pytest's exit codes for tests that failed, and for no tests.
_FAILED: Final = 1
_NOTHING: Final = 5
_SOON_S: Final = 60
#: So many are told of a lane, with what they took.
_SLOWEST: Final = 40
#: So many that fail again are enough to know.
_ENOUGH: Final = 8


def main(arguments: Sequence[str]) -> int:
    """Run all lanes, and alone what failed; return the worst exit code."""
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        caches = [Path(folder) / str(number) for number in range(len(LANES))]
        codes = _run([[*_pytest(cache), *lane, *arguments] for cache, lane in zip(caches, LANES, strict=True)])
        sys.stdout.write(f"all lanes: {time.monotonic() - begun_s:.0f} s\n")
        codes = [
            _again(cache, lane, arguments) if code == _FAILED else code
            for code, cache, lane in zip(codes, caches, LANES, strict=True)
        ]
        if failed := [test for cache in caches for test in _failed(cache)]:
            sys.stdout.write("\n".join(["failed alone, too:", *failed, ""]))
    ran = [code for code in codes if code != _NOTHING]
    return max(ran, key=abs) if ran else _NOTHING


def _pytest(cache: Path) -> list[str]:
    return [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", f"--durations={_SLOWEST}"]


def _run(commands: Sequence[Sequence[str]]) -> list[int]:
    with ExitStack() as files:
        said = [files.enter_context(tempfile.TemporaryFile()) for _ in commands[1:]]
        others = [
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
            for command, file in zip(commands[1:], said, strict=True)
        ]
        try:
            codes = [subprocess.call(commands[0]), *(other.wait() for other in others)]
        except KeyboardInterrupt:
            for other in others:
                other.send_signal(signal.SIGINT)
            codes = [130, *(other.wait(_SOON_S) for other in others)]
        for file, lane in zip(said, LANES[1:], strict=True):
            file.seek(0)
            sys.stdout.write(f"\n{'=' * 30} {' '.join(lane)} {'=' * 30}\n")
            sys.stdout.write(file.read().decode(errors="replace"))
    return codes


def _again(cache: Path, lane: Sequence[str], arguments: Sequence[str]) -> int:
    """Run what failed in a lane once more; return the exit code."""
    sys.stdout.write(f"\n{'=' * 30} alone, what failed in {lane[0]} {'=' * 30}\n")
    sys.stdout.flush()
    last = ["--last-failed", "--last-failed-no-failures", "none", f"--maxfail={_ENOUGH}"]
    return subprocess.call([*_pytest(cache), *lane, *arguments, *last, "-rfEp"])


def _failed(cache: Path) -> list[str]:
    """What pytest notes of the tests that failed when they last ran."""
    with contextlib.suppress(FileNotFoundError):
        return list(json.loads((cache / "v/cache/lastfailed").read_text()))
    return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
