"""``python -m tests.fault``: each fault under each load, with one hub and with three, on real processes."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec
import pytest

from tests.bench import report
from tests.fault.faults import Fault, all_faults
from tests.fault.judge import Row
from tests.fault.load import LOADS
from tests.fault.pairs import all_pairs
from tests.fault.runs import run
from tests.fault.site import Site
from tests.fault.soak import LEFT_OUT, RECEIPTS, Result, Soak, Window, page, weights_of
from tests.fault.soak import table as table_of_soak
from tests.support.binaries import require_docker, require_haproxy
from tests.support.netns import require_netns

_END: Final = "the end of a site"
_FAILED: Final = "could not be run:"
HEADS: Final = (
    "fault",
    "load",
    "hubs",
    "requests",
    "errors",
    "asked again",
    "longest wait, s",
    "longest stall, s",
    "detected, s",
    "recovered, s",
    "continued",
    "run again",
)


def table(rows: Sequence[Row]) -> str:
    """The rows as the page has them."""
    lines = [f"| {' | '.join(HEADS)} |", f"|{'---|' * len(HEADS)}"]
    lines += [f"| {' | '.join(_cells(row))} |" for row in rows]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> list[str]:
    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}" if value < 10 else f"{value:.0f}"

    counts = (row.requests, row.errors, row.broken)
    times = (row.longest_wait_s, row.longest_stall_s, row.detect_s, row.recover_s)
    done = (row.continued, row.run_again)
    return [row.fault, row.load, str(row.hubs), *map(str, counts), *map(seconds, times), *map(str, done)]


class Runs:
    """Runs on one site after the other: what a fault leaves broken goes with its site. ``told`` hears of each run."""

    def __init__(self, folder: Path, hubs: int, told: Callable[[Row], None]) -> None:
        self._folder = folder
        self._told = told
        self._hubs = hubs
        self._stack = ExitStack()
        self._site: Site | None = None
        self.rows: list[Row] = []
        #: Faults that can't be made here, and what the end of a site has left.
        self.more: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def run_all(self, faults: Sequence[str], loads: Sequence[str]) -> None:
        """Run each fault under each load."""
        known = _known()
        for name in faults:
            fault, _ = known[name]
            if reason := fault.why_not(self._whole_site()):
                self.more.append(f"{name}, with hubs: {self._hubs}: {reason}")
                continue
            for load in loads:
                try:
                    row, first = run(self._whole_site(), name, fault, load)
                except AssertionError as error:
                    self.more.append(f"{_FAILED} {name}, with hubs: {self._hubs}: {error}")
                    say(self.more[-1])
                    continue
                say(_line(row, first))
                self.rows.append(row)
                self._told(row)
        if self._site is not None:
            self.more += [f"{_END} with hubs: {self._hubs}: {wrong}" for wrong in self._site.stop()]

    def _whole_site(self) -> Site:
        if self._site is not None and (lack := self._site.lack() or self._site.lack_in_registry()):
            say(f"a new site, since this one has not recovered: {lack}")
            self._stack.close()
            self._site = None
        if self._site is None:
            folder = self._folder / f"site-{self._hubs}-{len(self.rows)}"
            self._site = self._stack.enter_context(Site(folder, self._hubs))
        return self._site


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _line(row: Row, first: str) -> str:
    verdict = "ok" if not row.wrong else f"BROKEN PROMISES: {'; '.join(row.wrong[:4])}"
    said = f"\n    first line: {first[:160]}" if first else ""
    return f"{' | '.join(_cells(row))} | lag {row.own_lag_s:.2f} s, load {row.load_average} | {verdict}{said}"


def _arguments() -> argparse.Namespace:
    """Parsed and checked: these faults are there, and this machine can have a site."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fault", action="append", help="only this one, or this pair (repeatable)")
    parser.add_argument("--two", action="store_true", help="the pairs, two faults at once; with three hubs")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="drawn faults and pairs all the time, so long")
    parser.add_argument("--seed", type=int, default=1, help="of a soak's draws")
    parser.add_argument("--weigh", action="store_true", help="of a soak: also write what its hubs' memory is made of")
    parser.add_argument("--load", action="append", choices=sorted(LOADS))
    parser.add_argument("--hubs", action="append", type=int, choices=(1, 3))
    parser.add_argument("--list", action="store_true", help="print all faults")
    parser.add_argument("--out", type=Path, help="a JSON file to write; the table goes beside it, with the suffix .md")
    given = parser.parse_args()
    if strange := set(given.fault or ()) - set(_known()):
        parser.error(f"no fault is called {', '.join(strange)}")
    if given.soak is not None and not given.soak > 0:
        parser.error("--soak takes more than 0 minutes")
    if given.soak and (strange := set(given.fault or ()) - set(_for_soak())):
        parser.error(f"a soak can't have {', '.join(strange)}")
    if not given.list:
        try:
            for require in (require_docker, require_haproxy, require_netns):
                require()
        except (pytest.skip.Exception, pytest.fail.Exception) as error:
            parser.error(str(error))
    return given


def _known() -> dict[str, tuple[Fault, str]]:
    """Faults and pairs of them, by name."""
    return all_faults() | all_pairs()


def _for_soak() -> dict[str, Fault]:
    return {name: fault for name, (fault, _) in _known().items() if not set(name.split("+")) & set(LEFT_OUT)}


def hubs_for(chosen: Sequence[str]) -> tuple[int, ...]:
    """With how many hubs these are run: a pair may take one, and has to leave another."""
    return (3,) if any("+" in name for name in chosen) else (1, 3)


def main() -> None:
    """See the module; exit with 1 if a promise was broken."""
    given = _arguments()
    if given.list:
        for name, (_, story) in _known().items():
            say(f"{name:{38 if '+' in name else 26}} {story}")
        return
    if given.soak:
        raise SystemExit(_soak(given))
    chosen = given.fault or list(all_pairs() if given.two else all_faults())
    began_s = time.monotonic()
    rows: list[Row] = []
    more: list[str] = []

    def told(row: Row) -> None:
        rows.append(row)
        # Each time: a long run that is cut short has been of use.
        if given.out:
            write(given.out, rows, more)

    with tempfile.TemporaryDirectory() as folder:
        for hubs in given.hubs or hubs_for(chosen):
            with Runs(Path(folder), hubs, told) as runs:
                runs.run_all(chosen, given.load or list(LOADS))
                more += runs.more
    say(table(rows))
    for line in more:
        say(line)
    broken = sum(bool(row.wrong) for row in rows)
    say(f"{len(rows)} runs in {time.monotonic() - began_s:.0f} s; {broken} broke a promise")
    if given.out:
        write(given.out, rows, more)
    raise SystemExit(1 if broken or any(line.startswith((_END, _FAILED)) for line in more) else 0)


def _soak(given: argparse.Namespace) -> int:
    """Soak, print the page and write it; the exit code. SIGTERM ends it early, with what there is."""
    known = _for_soak()
    chosen = {name: known[name] for name in given.fault or known}
    with tempfile.TemporaryDirectory() as folder:
        hubs = (given.hubs or [3])[0]
        flags = ("--receipts", str(RECEIPTS))
        module = f"tests.fault.{'weighed' if given.weigh else 'counted'}_hub"
        with Site(Path(folder) / "site", hubs, hub_module=module, hub_flags=flags) as site:
            soak = Soak(site, chosen, given.soak, given.seed)
            signal.signal(signal.SIGTERM, lambda *_: soak.stop())

            def told(window: Window) -> None:
                say(_line_of(window))
                if given.out:
                    _write_soak(given.out, None, soak.windows, {})

            result, sampled = soak.run(told)
            sampled["weights"] = weights_of(site)
            result = msgspec.structs.replace(result, wrong=[*result.wrong, *site.stop()])
            if given.out and result.wrong:
                _keep_logs(site, given.out.with_suffix(".logs"))
    say(page(result))
    if given.out:
        _write_soak(given.out, result, soak.windows, sampled)
        given.out.with_suffix(".md").write_text(table_of_soak(result))
    return 1 if result.wrong else 0


def _keep_logs(site: Site, folder: Path) -> None:
    """What all processes have said, to be read after the site is gone."""
    shutil.rmtree(folder, ignore_errors=True)
    for log in site.all_logs():
        kept = folder / log.relative_to(site.folder)
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(log, kept)


def _line_of(window: Window) -> str:
    recovered = "DID NOT RECOVER" if window.recover_s is None else f"recovered in {window.recover_s:.2f} s"
    failed = f", COULD NOT BE MADE: {window.failed}" if window.failed else ""
    lasted_s = window.healed_s - window.broke_s
    return f"{window.fault}: {lasted_s:.1f} s, {recovered}, load {window.load_average}{failed}"


def _write_soak(out: Path, result: Result | None, windows: Sequence[Window], sampled: Mapping[str, object]) -> None:
    """Write what there is as JSON: behind each fault without a result, and at the end with one."""
    out.parent.mkdir(parents=True, exist_ok=True)
    found = {"machine": report.machine(), "result": result, "faults": list(windows), **sampled}
    out.write_text(json.dumps(msgspec.to_builtins(found)) + "\n")


def write(out: Path, rows: Sequence[Row], more: Sequence[str]) -> None:
    """Write what there is so far as JSON, and as a table beside it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    found = {"machine": report.machine(), "rows": msgspec.to_builtins(list(rows)), "more": list(more)}
    out.write_text(json.dumps(found, indent=1) + "\n")
    out.with_suffix(".md").write_text(table(rows))


if __name__ == "__main__":
    main()
