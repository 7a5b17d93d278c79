"""One run: load, then the fault, then its heal, then quiet; and what was seen of it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from tests.fault.faults import Fault
from tests.fault.judge import Moments, Row, judge
from tests.fault.load import LOADS, Report
from tests.fault.site import ROOT, Site, figures_of
from tests.support.processes import Child, wait_for
from tests.support.quiet import soon_s

#: How long load runs before the fault, and at least behind its end.
BEFORE_S: Final = 3.0
BEHIND_S: Final = 3.0
#: How long a site may take to be as before, and to have ended what was asked.
RECOVERY_S: Final = 60.0
QUIET_S: Final = 15.0
#: Descriptors that a process may have more than before: what it opens for good when it first needs it.
SPARE_DESCRIPTORS: Final = 8
#: Free blocks of shared memory that a replica keeps for the next hand-offs; each has two descriptors.
KEPT_BLOCKS: Final = 256
#: Hubs say these of a start that is over.
_ABOUT_NO_FAULT: Final = ("hub.joined", "hub.ready")
#: What streams may stand still beyond what is promised, for each process that wants a core.
SLACK_S: Final = 0.1
_COUNTED: Final = ("continuations", "retries", "requests_resumed")


class FirstWord:
    """The first line that any hub logs from now on; the logs are looked at every 20 ms."""

    def __init__(self, logs: Callable[[], list[Path]]) -> None:
        self._logs = logs
        self._read = {log: log.stat().st_size for log in logs()}
        self._end = threading.Event()
        #: The moment and the line.
        self.found: tuple[float, str] | None = None
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while self.found is None and not self._end.wait(0.02):
            for log in self._logs():
                for line in self._new_lines(log):
                    if self.found is None and not any(event in line for event in _ABOUT_NO_FAULT):
                        self.found = time.monotonic(), line

    def _new_lines(self, log: Path) -> list[str]:
        began = self._read.get(log, 0)
        if not log.exists() or log.stat().st_size <= began:
            return []
        with log.open("rb") as file:
            file.seek(began)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read[log] = began + len(whole)
        return whole.decode(errors="replace").splitlines()

    def stop(self) -> None:
        """Look no more."""
        self._end.set()
        self._thread.join()


def run(site: Site, name: str, fault: Fault, load: str) -> tuple[Row, str]:
    """Do it; the row, and a hub's first line about it."""
    fault.prepare(site)
    try:
        return _run(site, name, fault, load)
    finally:
        fault.restore(site)


def _run(site: Site, name: str, fault: Fault, load: str) -> tuple[Row, str]:
    before, sizes = site.processes(), {log: log.stat().st_size for log in site.all_logs()}
    counts, found = _counts(site), []
    busy = os.getloadavg()[0]
    with clients_of(site, load) as clients:
        time.sleep(BEFORE_S)
        first = FirstWord(site.logs)
        broke_s = time.monotonic()
        fault.break_it(site)
        time.sleep(fault.lasts_s)
        fault.heal(site)
        healed_s = time.monotonic()
        whole_s = whole_since(site)
        time.sleep(BEHIND_S)
        first.stop()
        clients.must_run()
        counted = {each: value - counts.get(each, 0.0) for each, value in _counts(site).items()}
    report = msgspec.json.decode((site.folder / "load.json").read_bytes(), type=Report)
    found += left_by(site, before, sizes)
    if fault.is_noticed and first.found is None:
        found.append("no hub has a line about it")
    noticed_s, line = first.found or (None, "")
    row = judge(
        (name, load, len(site.names)),
        LOADS[load],
        fault.promise,
        report,
        Moments(broke_s, healed_s, noticed_s, whole_s, time.monotonic()),
        {metric: sum(v for (_, each), v in counted.items() if each == metric) for metric in _COUNTED},
        found,
        stall_slack_s=SLACK_S * os.getloadavg()[0] / (os.cpu_count() or 1),
        recovery_slack_s=soon_s(fault.promise.recovery_s) - fault.promise.recovery_s,
        load_average=round(max(busy, os.getloadavg()[0]), 2),
    )
    return row, line


@contextmanager
def clients_of(site: Site, load: str) -> Iterator[Child]:
    """The clients, asking until the block ends; then they end what they have asked."""
    host, port = site.address
    flags = ["--host", host, "--port", str(port), "--load", load, "--out", "load.json"]
    child = Child(
        flags,
        site.folder,
        "load",
        module="tests.fault.load",
        variables={"PYTHONPATH": str(ROOT)},
        host=site.hosts["front"],
    )
    try:
        yield child
    finally:
        child.stop(timeout_s=120.0)
    assert child.process.returncode == 0, child.text


def whole_since(site: Site) -> float | None:
    """Since when the site lacks nothing; None if it goes on lacking something."""
    deadline_s = time.monotonic() + RECOVERY_S
    while time.monotonic() < deadline_s:
        since_s = time.monotonic()
        if not site.lack() and not site.lack_in_registry() and not site.lack():
            return since_s
        time.sleep(0.1)
    return None


def _counts(site: Site) -> dict[tuple[int, str], float]:
    """What hubs have counted, by process and metric: a hub that is started again begins at zero."""
    found = {}
    for hub in site.hubs.values():
        figures = figures_of(hub.url) or {}
        for metric in _COUNTED:
            values = [value for name, value in figures.items() if name.startswith(f"omni_hub_{metric}_total")]
            found[hub.process.pid, metric] = sum(values)
    return found


def left_by(site: Site, before: dict[int, tuple[str, int, int]], sizes: dict[Path, int]) -> list[str]:
    """What a run has left behind: requests, slots, descriptors, shared memory, and bugs in the log."""
    wrong = []
    try:
        wait_for("the end of all requests", lambda: site.under_way() == "", QUIET_S)
    except AssertionError:
        wrong.append(f"still under way: {site.under_way()}")
    if lack := site.lack() or site.lack_in_registry():
        wrong.append(f"at the end: {lack}")
    else:
        wrong += _grown(site, before)
    for log in site.all_logs():
        with log.open("rb") as file:
            file.seek(min(sizes.get(log, 0), log.stat().st_size))
            text = file.read().decode(errors="replace")
        if "Traceback" in text:
            wrong.append(f"a traceback in {log.parent.name}: {text[text.index('Traceback') :][:600]}")
    return wrong


def _grown(site: Site, before: dict[int, tuple[str, int, int]]) -> list[str]:
    """Descriptors and shared memory of the processes that were there before."""
    wrong: list[str] = []

    def is_as_before() -> bool:
        wrong.clear()
        for pid, (who, descriptors, files) in site.processes().items():
            if pid not in before:
                continue
            _, descriptors_before, files_before = before[pid]
            if files > max(files_before, KEPT_BLOCKS):
                wrong.append(f"{who} has {files} files in /dev/shm, {files_before} before")
            if descriptors - 2 * files > descriptors_before - 2 * files_before + SPARE_DESCRIPTORS:
                wrong.append(f"{who} has {descriptors} descriptors, {descriptors_before} before")
        return not wrong

    try:
        wait_for("descriptors", is_as_before, QUIET_S)
    except AssertionError:
        return wrong
    return []
