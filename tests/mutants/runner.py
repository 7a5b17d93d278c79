"""Makes changes one at a time, each in a forked child, and runs the tests that run the changed lines.

A change in a function replaces the function's code after everything was imported; one that runs at import is compiled
when its module is imported. No file is written: the checkout stays as it is.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Final, TypeVar

import hypothesis
import msgspec
import pytest
from _pytest.runner import runtestprotocol

from tests.mutants.changes import Change

_Answer = TypeVar("_Answer")
_Limit = tuple[float, float]

ROOT: Final = Path(__file__).resolve().parents[2]
_NOTICED, _SURVIVED, _ERROR = 1, 0, 99
#: What a child may use beyond five times what its tests use without a change: seconds of a processor, and of the clock.
_LIMIT_S: Final = (3.0, 20.0)
#: Beyond what its tests use, what importing them uses.
_IMPORT_S: Final = 10.0
#: So many calls of a function are followed in one test: statistics call some a million times.
_TRACED_CALLS: Final = 1000
#: So many tests are run in a child without a change, to see that a child alone makes none fail.
_CONTROLS: Final = 5
#: pytest would rewrite the assertions of a plugin that is imported already.
_IGNORED: Final = "ignore::pytest.PytestAssertRewriteWarning"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a change: ``noticed``, ``survived``, or ``not run`` where no test runs it."""

    change: Change
    outcome: str
    #: How many tests run the change.
    tests: int


def judge(changes: Sequence[Change], folders: Sequence[str], told: Callable[[Verdict], None]) -> list[str]:
    """Judge changes by the tests in folders, and tell each verdict; return the tests that fail without any change."""
    known = _in_child_with_answer(lambda: _collect_and_judge(changes, folders), _Known)
    for index, (outcome, tests) in known.outcomes.items():
        told(Verdict(changes[index], outcome, tests))
    for files, _, limit_s in [*known.at_import.values()][:1]:
        if _in_child(partial(_import_and_run, None, files, known.failing), limit_s) != _SURVIVED:
            raise RuntimeError("tests fail where nothing was changed")
    for index, (files, tests, limit_s) in known.at_import.items():
        code = _in_child(partial(_import_and_run, changes[index], files, known.failing), limit_s)
        told(Verdict(changes[index], "survived" if code == _SURVIVED else "noticed", tests))
    return known.failing


@dataclass(slots=True)
class _Known:
    """What a child that collected the tests has found out."""

    failing: list[str]
    outcomes: dict[int, tuple[str, int]]
    #: By the change that runs at import: the files of the tests to run, how many, and for how long at most.
    at_import: dict[int, tuple[list[str], int, _Limit]]


def _collect_and_judge(changes: Sequence[Change], folders: Sequence[str]) -> _Known:
    plugin = _Judge(changes)
    _pytest(list(folders), plugin)
    assert plugin.known is not None, f"no tests were collected in {folders}"
    return plugin.known


def _pytest(arguments: list[str], *plugins: object) -> int:
    hypothesis.settings.register_profile(
        "mutants",
        database=None,
        derandomize=True,
        deadline=None,
        phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("mutants")
    return int(pytest.main(["-q", "-p", "no:cacheprovider", "-W", _IGNORED, *arguments], plugins=list(plugins)))


class _Judge:
    """A pytest plugin: runs the collected tests once, traced, and then for each change those that run it."""

    def __init__(self, changes: Sequence[Change]) -> None:
        self._changes = changes
        self.known: _Known | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Judge every change in place of the tests' usual run."""
        items = session.items
        paths = {str(ROOT / change.path) for change in self._changes}
        traced = _in_child_with_answer(lambda: [_trace(item, paths) for item in items], list[_Traced])
        failing = [item.nodeid for item, each in zip(items, traced, strict=True) if each.failed]
        self.known = _Known(failing, {}, {})
        fine = [item for item, each in zip(items, traced, strict=True) if not each.failed]
        if fine and _in_child(lambda: _swap_and_run([], fine[:_CONTROLS]), _limit_of(_LIMIT_S[1])) != _SURVIVED:
            raise RuntimeError("tests fail in a child where nothing was changed")
        functions = _functions(paths)
        for index, change in enumerate(self._changes):
            path = str(ROOT / change.path)
            by_time = sorted(
                (each.used_s, position)
                for position, each in enumerate(traced)
                if not each.failed and _runs(each.lines.get(path), change)
            )
            limit_s = _limit_of(sum(used_s for used_s, _ in by_time))
            chosen = [items[position] for _, position in by_time]
            if not chosen:
                self.known.outcomes[index] = ("not run", 0)
                continue
            swaps = _swaps(change, functions)
            if swaps is None:
                files = sorted({item.nodeid.partition("::")[0] for item in chosen})
                # The files are imported once more, and all of their tests are run.
                self.known.at_import[index] = (files, len(chosen), _limit_of(_IMPORT_S + sum(e.used_s for e in traced)))
                continue
            code = _in_child(partial(_swap_and_run, swaps, chosen), limit_s)
            self.known.outcomes[index] = ("survived" if code == _SURVIVED else "noticed", len(chosen))
        return True


def _limit_of(used_s: float) -> _Limit:
    """How long a child may take whose tests used so many seconds of a processor without a change."""
    return _LIMIT_S[0] + 5 * used_s, _LIMIT_S[1] + 20 * used_s


def _runs(lines: set[int] | None, change: Change) -> bool:
    if not change.outermost:
        return True  # a field's default: any test may make use of it, and runs no line of the file
    return lines is not None and not lines.isdisjoint(change.lines)


@dataclass(slots=True)
class _Traced:
    """One test's run without a change: the lines that it ran, by file."""

    failed: bool
    used_s: float
    lines: dict[str, set[int]]


def _trace(item: pytest.Item, paths: set[str]) -> _Traced:
    lines: dict[str, set[int]] = defaultdict(set)
    calls: Counter[CodeType] = Counter()

    def in_frame(frame: FrameType, event: str, _: object) -> Any:
        lines[frame.f_code.co_filename].add(frame.f_lineno)
        return in_frame

    def entered(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in paths:
            return None
        calls[frame.f_code] += 1
        return in_frame if calls[frame.f_code] <= _TRACED_CALLS else None

    begun_s = time.process_time()
    sys.settrace(entered)
    try:
        failed = _fails(item, None)
    finally:
        sys.settrace(None)
    return _Traced(failed, time.process_time() - begun_s, dict(lines))


def _fails(item: pytest.Item, following: pytest.Item | None) -> bool:
    return any(report.failed for report in runtestprotocol(item, nextitem=following, log=False))


def _functions(paths: set[str]) -> dict[tuple[str, str, int], list[FunctionType]]:
    """Every function of some files that exists, by file, name and line."""
    found: dict[tuple[str, str, int], list[FunctionType]] = defaultdict(list)
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename in paths:
            found[_place_of(each.__code__)].append(each)
    return found


def _place_of(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _swaps(
    change: Change, functions: dict[tuple[str, str, int], list[FunctionType]]
) -> list[tuple[FunctionType, CodeType]] | None:
    """Which functions get which code; None where the change is not in the code of a function alone."""
    if not change.outermost:
        return None
    module = change.compiled(str(ROOT / change.path))
    places = [(_place_of(code), code) for code in _codes(module) if code.co_qualname == change.outermost]
    found = [(each, code) for place, code in places for each in functions.get(place, ())]
    fits = all(len(each.__code__.co_freevars) == len(code.co_freevars) for each, code in found)
    return found if found and fits else None


def _codes(code: CodeType) -> list[CodeType]:
    inside = [each for each in code.co_consts if isinstance(each, CodeType)]
    return [*inside, *(deeper for each in inside for deeper in _codes(each))]


def _swap_and_run(swaps: list[tuple[FunctionType, CodeType]], items: list[pytest.Item]) -> int:
    for function, code in swaps:
        function.__code__ = code
    for item, following in zip(items, [*items[1:], None], strict=True):
        if _fails(item, following):
            return _NOTICED
    return _SURVIVED


class _ChangedImport(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):  # type: ignore[misc]
    """Finds one module, and compiles it with a change made."""

    def __init__(self, change: Change) -> None:
        name = change.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        super().__init__(name, str(ROOT / change.path))
        self._change = change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Answer for the one module."""
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def get_code(self, fullname: str) -> CodeType:
        """Compile the module with the change made."""
        return self._change.compiled(self.path)


def _import_and_run(change: Change | None, files: list[str], failing: list[str]) -> int:
    if change is not None:
        sys.meta_path.insert(0, _ChangedImport(change))
    ended = _pytest(["-x", *files, *(f"--deselect={each}" for each in failing)])
    return _SURVIVED if ended == pytest.ExitCode.OK else _NOTICED


def _in_child_with_answer(work: Callable[[], _Answer], kind: type[_Answer]) -> _Answer:
    with tempfile.TemporaryFile() as answer:

        def run() -> int:
            answer.write(msgspec.msgpack.encode(work()))
            answer.flush()
            return _SURVIVED

        code = _in_child(run, None)
        if code != _SURVIVED:
            raise RuntimeError(f"a child that should have run tests ended with {code}")
        answer.seek(0)
        return msgspec.msgpack.decode(answer.read(), type=kind)


def _in_child(work: Callable[[], int], limit_s: _Limit | None) -> int:
    """Run something in a forked child; return its exit code, negative if a signal ended it."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _be_child(work, limit_s)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what its tests left
    return os.waitstatus_to_exitcode(status)


def _be_child(work: Callable[[], int], limit_s: _Limit | None) -> None:
    code = _ERROR
    try:
        if limit_s is not None:
            os.setpgid(0, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, limit_s[0])
            signal.setitimer(signal.ITIMER_REAL, limit_s[1])
        # The descriptor, not the object: one that is thrown away unclosed fails the test that runs then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
        code = work()
    except BaseException:  # noqa: BLE001 - the exit code tells it, and a person may want to know why
        traceback.print_exc()
    finally:
        os._exit(code)
