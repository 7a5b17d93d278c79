"""A copy of this tree with its hot modules compiled: ``python -m tests.bench.compiled FOLDER --tools BIN``.

Decision 18 says what came out. ``BIN`` is the folder of an environment's programs that has ``cython`` and a Python of
this version; gcc must be there, too. Nothing in the code is changed for the compiler. Then, in this checkout:

    python -m tests.bench.before_after --before . --after FOLDER --subjects paths hub_overhead data_plane
    (cd FOLDER && python -m tests.guard)
    (cd FOLDER && python -m pytest tests/unit/hub tests/unit/stage_runtime/server)

``python -m tests.bench.compiled --stacks FILE`` says instead which part of a profile is spent in which modules: of one
thread, waits left out. FILE is what ``py-spy record --native --threads --format raw`` has written of a
hub under load. What is counted as interpreted takes Python's own functions in, so that it is the most that any
compiler could save.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.bench import report
from tests.bench.call_log import ROOT

#: The pure modules that a request passes, by the profiles.
_CORES: Final = (
    *(f"omni_discovery/{name}.py" for name in ("wire/containers", "wire/frames", "view/table")),
    *(f"omni_discovery/balancing/{name}.py" for name in ("policies", "weighted")),
    *(f"hub/pool/{name}.py" for name in ("core", "credits", "entry")),
    *(f"hub/request/{name}.py" for name in ("machine", "nesting", "outputs", "pieces", "plan", "state", "story")),
)
#: What else it passes, in the hub and in the replica.
_DRIVERS: Final = (
    *(f"hub/orchestrator/{name}.py" for name in ("admission", "dispatcher", "orchestrator", "replica_events")),
    "hub/orchestrator/requests.py",
    *(f"hub/replicas/{name}.py" for name in ("pending", "sockets", "stage_client")),
    *(f"hub/api/{name}.py" for name in ("exchange", "chat/answer", "chat/choices")),
    *(f"hub/api/generation/{name}.py" for name in ("running", "timings")),
    *("hub/output_queue.py", "hub/receipts/raw.py"),
    *(f"stage_runtime/engine_loop/{name}.py" for name in ("check_output", "loop", "running")),
    *(f"stage_runtime/server/{name}.py" for name in ("credits", "outbox", "sessions")),
)
MODULES: Final = (*_CORES, *_DRIVERS)
#: Frames of Python, and what of the interpreter's own a frame without a library's name is.
_PYTHON: Final = re.compile(r"\(([^()]*\.py|<[a-z ]+>):\d+\)$")
_OURS: Final = re.compile(r"(hub|omni_discovery|stage_runtime)/")
_WAITS: Final = ("epoll_wait", "uv__io_poll")
_INTERPRETER: Final = ("libpython", ".h:", "<frozen")


def copy_tree(folder: Path) -> None:
    """All files that git knows here, as they are now."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def compile_module(folder: Path, name: str, tools: Path) -> str:
    """Put a module's extension beside it. Empty, or what the compiler said."""
    source = folder / name
    made = source.with_suffix(".c")
    extension = source.with_suffix(str(sysconfig.get_config_var("EXT_SUFFIX")))
    # Annotations are for mypy: read by Cython, they would refuse a StrEnum where a str is due.
    cython = [str(tools / "cython"), "-3", "-X", "annotation_typing=False", str(source), "-o", str(made)]
    include = sysconfig.get_path("include")
    gcc = ["gcc", "-O2", "-g0", "-w", "-shared", "-fPIC", f"-I{include}", str(made), "-o", str(extension)]
    for command in (cython, gcc):
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if ran.returncode:
            return ran.stdout + ran.stderr
    made.unlink()
    return ""


@dataclass(slots=True)
class Shares:
    """Samples of a profile, by what they were in."""

    samples: int = 0
    by_place: Counter[str] = field(default_factory=Counter)
    by_file: Counter[str] = field(default_factory=Counter)

    def note(self, frames: list[str], count: int) -> None:
        """Add one stack, its outermost frame first."""
        if any(word in frames[-1] for word in _WAITS):
            return
        beyond = 0
        while beyond < len(frames) and not _PYTHON.search(frames[-1 - beyond]):
            beyond += 1
        found = _PYTHON.search(frames[-1 - beyond]) if beyond < len(frames) else None
        file = found[1] if found is not None else "no Python"
        is_ours = _OURS.match(file) is not None
        is_interpreted = beyond == 0 or any(word in frames[-1] for word in _INTERPRETER) or ".so" not in frames[-1]
        self.samples += count
        self.by_file[file] += count
        self.by_place["ours" if is_ours else "others'"] += count
        if is_ours and is_interpreted:
            self.by_place["ours, interpreted"] += count
            self.by_place["to be compiled, interpreted"] += count * (file in MODULES)
            self.by_place["pure cores, interpreted"] += count * (file in _CORES)


def shares_of(lines: Iterable[str], thread: str) -> Shares:
    """Of py-spy's raw output, and of threads whose name has this in it."""
    shares = Shares()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        if thread in frames[0]:
            shares.note(frames, int(count))
    return shares


def main() -> int:
    """Build, or read a profile; 1 if a module could not be compiled."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.compiled", description=(__doc__ or "").split(":")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="where the copy comes to be")
    parser.add_argument("--tools", type=Path, help="folder of an environment's programs that has cython")
    parser.add_argument("--stacks", type=Path, help="read this profile instead")
    parser.add_argument("--thread", default="MainThread", help="which thread of the profile (default MainThread)")
    parser.add_argument("--at-once", type=int, default=2, help="compilers at once (default 2)")
    given = parser.parse_args()
    if given.stacks is not None:
        with given.stacks.open() as file:
            shares = shares_of(file, given.thread)
        for title, counted in (("place", shares.by_place), ("file", shares.by_file)):
            rows = [{title: name, "percent": round(100 * n / shares.samples, 1)} for name, n in counted.most_common(40)]
            report.show(f"{shares.samples} samples by {title}", rows)
        return 0
    if given.folder is None or given.tools is None:
        parser.error("a folder and --tools are needed, or --stacks")
    folder: Path = given.folder.resolve()
    copy_tree(folder)
    with ThreadPoolExecutor(given.at_once) as pool:
        said = list(pool.map(lambda name: compile_module(folder, name, given.tools), MODULES))
    rows = [{"module": name, "says": text or "compiled"} for name, text in zip(MODULES, said, strict=True)]
    report.show(f"compiled in {folder}", rows)
    return 1 if any(said) else 0


if __name__ == "__main__":
    raise SystemExit(main())
