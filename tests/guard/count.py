"""How many instructions a turn of each hot path takes, as valgrind counts them.

The processor's own counters are not to be had in most virtual machines, and time says little on a busy one. Valgrind
counts what is executed, whatever else runs: in two runs of the same code the counts differ by less than a hundredth.
One process under valgrind imports all, makes each path ready, runs it once, and then again between two system calls
that nothing else makes: the first sets the counter to zero, the other writes it down.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path as File
from tempfile import TemporaryDirectory
from typing import Final

from tests.guard.paths import CALL, LOOP, PATHS, REFERENCE, Path, Run, running_loop, wasteful

ROOT: Final = File(__file__).resolve().parents[2]
ALL: Final = (LOOP, CALL, REFERENCE, *PATHS)
#: Beyond any run on a busy machine.
_LIMIT_S: Final = 900.0
_BEGIN: Final = "getsid"
_END: Final = "getpgid"
_SUMMARY: Final = re.compile(r"^summary: (\d+)$", re.MULTILINE)


def environment() -> dict[str, str]:
    """What else decides how many instructions are executed."""
    return {
        "machine": platform.machine(),
        "python": " ".join(sys.version.split()),
        "libc": " ".join(platform.libc_ver()),
        "msgspec": importlib.metadata.version("msgspec"),
    }


@dataclass(frozen=True, slots=True)
class Counts:
    """Instructions of one turn, by the name of the path."""

    plain: dict[str, int]
    #: Those of the paths that were made dearer, and counted again.
    dearer: dict[str, int]


def count(dearer: Mapping[str, int] | None = None, known: Mapping[str, int] | None = None) -> Counts:
    """Count all paths. Raise RuntimeError, TimeoutExpired.

    ``dearer``: by how many instructions paths are made dearer to be counted once more; ``known`` are the costs of LOOP
    and CALL, by which that is done.
    """
    told = {
        "dearer": dearer or {},
        "of_loop": (known or {}).get(LOOP.name, 1),
        "of_call": (known or {}).get(CALL.name, 0),
    }
    with TemporaryDirectory() as folder:
        command = [
            *("valgrind", "--quiet", "--tool=callgrind", f"--callgrind-out-file={folder}/counts"),
            *(f"--zero-before={_BEGIN}", f"--dump-before={_END}"),
            *(sys.executable, "-m", "tests.guard.count", json.dumps(told)),
        ]
        # Names of the environment lie on the stack, and sets of texts are ordered by their hashes.
        variables = {"PATH": os.environ["PATH"], "PYTHONHASHSEED": "0"}
        ran = subprocess.run(
            command, cwd=ROOT, env=variables, text=True, capture_output=True, timeout=_LIMIT_S, check=False
        )
        if ran.returncode:
            raise RuntimeError(f"the paths can't be counted:\n{ran.stdout}{ran.stderr}")
        # The first dump has what the dynamic linker does at the first call.
        counted = [_counted(File(folder) / f"counts.{number + 2}") for number in range(len(ALL) + len(dearer or {}))]
    found = iter(counted)
    plain, again = {}, {}
    for path in ALL:
        plain[path.name] = round(next(found) / path.turns)
        if dearer and path.name in dearer:
            again[path.name] = round(next(found) / path.turns)
    return Counts(plain, again)


def _counted(dump: File) -> int:
    found = _SUMMARY.search(dump.read_text())
    if found is None:
        raise RuntimeError(f"{dump.name} has no summary")
    return int(found[1])


def _run_all(dearer: Mapping[str, int], of_loop: int, of_call: int) -> None:
    """What the process under valgrind does."""
    _between_marks(lambda: None)
    for path in ALL:
        run = path.make()
        _run_once(path, run)
        if path.name in dearer:
            with _made_dearer(path, run, dearer[path.name], of_loop, of_call):
                _run_once(path, run)


def _run_once(path: Path, run: Run) -> None:
    run(path.turns)
    # When garbage is collected depends on all that ran before.
    gc.collect()
    gc.disable()
    _between_marks(lambda: run(path.turns))
    gc.enable()


def _between_marks(work: Callable[[], None]) -> None:
    os.getsid(0)
    work()
    os.getpgid(0)


@contextmanager
def _made_dearer(path: Path, run: Run, instructions: int, of_loop: int, of_call: int) -> Iterator[None]:
    """Have a function inside of the path waste so many instructions in each turn of the path."""
    assert path.inside is not None
    (owner, name), calls = path.inside, list[int]()
    function = getattr(owner, name)
    setattr(owner, name, wasteful(function, 0, lambda: calls.append(1)))
    run(path.turns)
    of_each = instructions * path.turns // len(calls)
    setattr(owner, name, wasteful(function, max(0, of_each - of_call) // of_loop, calls.clear))
    yield
    setattr(owner, name, function)


if __name__ == "__main__":
    running_loop(lambda: _run_all(**json.loads(sys.argv[1])))
