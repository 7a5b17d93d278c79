"""``python -m tests.fault --soak MINUTES``: drawn faults under a steady load all the time, every answer compared.

Beside the answers it judges that nothing grows: what processes hold is sampled, and a line is laid through it. What
came in the first half is not fitted: caches fill then, and malloc's free memory does.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any, Final

import msgspec

from tests.fault.faults import Fault
from tests.fault.flat import BOUNDS, Fit, line_of
from tests.fault.judge import Promise
from tests.fault.load import Report, Seen
from tests.fault.runs import BEHIND_S, RECOVERY_S, SLACK_S, clients_of, left_by, whole_since
from tests.fault.samples import Samples
from tests.fault.site import Site
from tests.support.quiet import soon_s

LOAD: Final = "steady"
#: Receipts that each hub keeps. Of 10 000, the default, the ring fills for two hours, which can't be told from a leak;
#: this one is full before the lines of half an hour begin.
RECEIPTS: Final = 100
#: What starts every process again would end all series, and one needs that before it begins.
LEFT_OUT: Final = ("no-fault", "clock-steps", "rolling-restart")
#: Between two faults.
PAUSES_S: Final = (1.0, 6.0)
#: The share of the time that is not fitted, and that of the rest which a process must have lived to be judged.
SETTLING: Final = 0.5
JUDGED: Final = 0.5
#: What processes of one site hold that is judged; each must have been judged of some process of each kind.
_KINDS: Final = ("hub", "supervisor", "replica 0")
#: How a fault may fail to be made, Docker's errors among them.
_FAILURES: Final = (AssertionError, AttributeError, LookupError, OSError, ValueError, subprocess.SubprocessError)
#: A stall behind the recovery is still the fault's where its request was under way then.
_BEHIND_S: Final = 2.0


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of a soak, on the clock that processes share."""

    fault: str
    broke_s: float
    healed_s: float
    #: None: it did not recover.
    whole_s: float | None
    promise: Promise
    load_average: float
    #: Why it could not be made; empty if it was.
    failed: str = ""
    #: What the site went on lacking, where it did not recover.
    lacked: str = ""

    @property
    def recover_s(self) -> float | None:
        return None if self.whole_s is None else max(0.0, self.whole_s - self.healed_s)

    @property
    def allowed_s(self) -> float:
        """How long a stream may stand still in it."""
        return self.promise.stall_s if self.promise.stall_s is not None else self.healed_s - self.broke_s + 1.0

    def is_under_way(self, from_s: float, until_s: float) -> bool:
        """Whether it overlaps this span of time."""
        whole_s = self.whole_s if self.whole_s is not None else self.healed_s + RECOVERY_S
        return self.broke_s <= until_s and from_s <= whole_s + _BEHIND_S


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A soak, as it is published."""

    minutes: float
    seed: int
    hubs: int
    requests: int
    errors: int
    asked_again: int
    longest_wait_s: float
    longest_stall_s: float
    faults: int
    kinds: int
    #: The longest recovery, and of what.
    recover_s: float
    slowest: str
    fits: list[Fit]
    own_lag_s: float
    load_average: float
    wrong: list[str]


def drawn(names: Sequence[str], dice: Random) -> Iterator[str]:
    """The names in a random order, again and again: each comes once before any comes twice."""
    while True:
        order = list(names)
        dice.shuffle(order)
        yield from order


def judge_requests(report: Report, windows: Sequence[Window], slack_s: float) -> list[str]:
    """What clients should not have seen. Answers may break only while a hub is taken; stalls are those promised."""
    wrong = [] if report.requests else ["nothing was asked"]
    for seen in report.requests:
        around = [each for each in windows if each.is_under_way(seen.asked_s, seen.ended_s)]
        if seen.error:
            wrong.append(f"request {seen.number}: {seen.error} ({_names(around)})")
        if not any(each.promise.takes_a_hub for each in around):
            if seen.broken:
                wrong.append(f"request {seen.number} broke: {seen.causes[0]} ({_names(around)})")
            if seen.refused:
                wrong.append(f"request {seen.number} was told to come later ({_names(around)})")
        wrong += _stalled(seen, windows, slack_s)
    return wrong


def _stalled(seen: Seen, windows: Sequence[Window], slack_s: float) -> list[str]:
    around = [each for each in windows if each.is_under_way(seen.stalled_at_s, seen.stalled_at_s + seen.stall_s)]
    allowed_s = sum(each.allowed_s for each in around) or Promise().stall_s or 0.0
    if seen.stall_s <= allowed_s + slack_s:
        return []
    said = f"request {seen.number} stood still for {seen.stall_s:.2f} s; {allowed_s:g} s are promised"
    return [f"{said} ({_names(around)})"]


def _names(windows: Sequence[Window]) -> str:
    return ", ".join(each.fault for each in windows) or "no fault"


def _lack_of(site: Site) -> str:
    """What hubs and registry lack, and how etcd's members say they are."""
    said = [site.lack(), site.lack_in_registry()]
    for subject in (("endpoint", "status"), ("alarm", "list")):
        try:
            said.append(site.etcdctl(*subject))
        except subprocess.SubprocessError as error:
            said.append(str(error))
    return "; ".join(each.strip() for each in said if each)


def weights_of(site: Site) -> dict[str, list[Any]]:
    """What hubs' memory was made of at several moments, by hub; empty where they were not weighed."""
    files = {name: site.folder / name / "weights" for name in site.names}
    return {
        name: [json.loads(line) for line in file.read_text().splitlines()]
        for name, file in files.items()
        if file.exists()
    }


def judge_windows(windows: Sequence[Window]) -> list[str]:
    """Faults that could not be made, and recoveries that were late or did not come."""
    wrong = []
    for each in windows:
        if each.failed:
            wrong.append(f"{each.fault} could not be made: {each.failed}")
        promised_s = each.promise.recovery_s
        if each.recover_s is None:
            wrong.append(f"{each.fault}: the site did not recover: {each.lacked}")
        elif each.recover_s > promised_s + (slack_s := soon_s(promised_s) - promised_s):
            said = f"{each.fault}: {each.recover_s:.1f} s to recover; {promised_s:g} s are promised"
            wrong.append(f"{said} ({slack_s:.0f} s more on this machine)")
    return wrong


def judge_growth(fits: Sequence[Fit]) -> list[str]:
    """What grows, and what was not judged at all."""
    wrong = [line_of(each) for each in fits if not each.is_flat]
    judged = {each.who for each in fits}
    wrong += [f"no {kind} lived long enough to be judged" for kind in _KINDS if not _some(judged, kind)]
    return wrong


def _some(judged: set[str], kind: str) -> bool:
    return any(who == kind or who.startswith(f"{kind} ") for who in judged)


class Soak:
    """One soak of a site; ``stop`` ends it behind the present fault, with a result of what there is."""

    def __init__(self, site: Site, faults: Mapping[str, Fault], minutes: float, seed: int) -> None:
        self._site = site
        self._faults = {name: fault for name, fault in faults.items() if not fault.why_not(site)}
        self._minutes = minutes
        self._seed = seed
        self._end = threading.Event()
        self.windows: list[Window] = []

    def stop(self) -> None:
        """Make no further fault."""
        self._end.set()

    def run(self, told: Callable[[Window], None]) -> tuple[Result, dict[str, Any]]:
        """Do it; the result, and all that was sampled. ``told`` hears of each fault when it is over."""
        site, began_s = self._site, time.monotonic()
        sizes = {log: log.stat().st_size for log in site.all_logs()}
        every_s = min(5.0, max(1.0, self._minutes * 60.0 / 120.0))
        with Samples(site, every_s) as samples, clients_of(site, LOAD) as clients:
            self._break_again_and_again(began_s + 60.0 * self._minutes, told)
            time.sleep(BEHIND_S)
            clients.must_run()
            ended_s = time.monotonic()
        report = msgspec.json.decode((site.folder / "load.json").read_bytes(), type=Report)
        from_s = began_s + SETTLING * (ended_s - began_s)
        fits = samples.fits(from_s, JUDGED * (ended_s - from_s))
        found = left_by(site, {}, sizes)
        sampled = {"series": samples.as_built_in(began_s), "tasks": samples.tasks()}
        return self._result((ended_s - began_s) / 60.0, report, fits, found), sampled

    def _break_again_and_again(self, end_s: float, told: Callable[[Window], None]) -> None:
        dice = Random(self._seed)
        for name in drawn(sorted(self._faults), dice):
            if self._end.wait(dice.uniform(*PAUSES_S)) or time.monotonic() > end_s:
                return
            self.windows.append(self._break(name))
            told(self.windows[-1])
            if self.windows[-1].whole_s is None:
                return

    def _break(self, name: str) -> Window:
        fault, broke_s, failed = self._faults[name], time.monotonic(), ""
        try:
            fault.break_it(self._site)
            self._end.wait(fault.lasts_s)
        except _FAILURES as error:
            # Told, and a broken promise of this test; what it has done so far is healed all the same.
            failed = f"{type(error).__name__}: {error}"[:300]
        try:
            fault.heal(self._site)
        except _FAILURES as error:
            failed = failed or f"{type(error).__name__}: {error}"[:300]
        healed_s = time.monotonic()
        whole_s = whole_since(self._site)
        return Window(
            fault=name,
            broke_s=broke_s,
            healed_s=healed_s,
            whole_s=whole_s,
            lacked=_lack_of(self._site) if whole_s is None else "",
            promise=fault.promise,
            load_average=round(os.getloadavg()[0], 2),
            failed=failed,
        )

    def _result(self, minutes: float, report: Report, fits: list[Fit], found: Sequence[str]) -> Result:
        busy = max((each.load_average for each in self.windows), default=os.getloadavg()[0])
        slack_s = SLACK_S * busy / (os.cpu_count() or 1) + report.own_lag_s
        slowest = max(self.windows, key=lambda each: each.recover_s or 0.0, default=None)
        wrong = [*judge_requests(report, self.windows, slack_s), *judge_windows(self.windows), *judge_growth(fits)]
        return Result(
            minutes=minutes,
            seed=self._seed,
            hubs=len(self._site.names),
            requests=len(report.requests),
            errors=sum(bool(seen.error) for seen in report.requests),
            asked_again=sum(seen.broken for seen in report.requests),
            longest_wait_s=max((seen.first_after_s or 0.0 for seen in report.requests), default=0.0),
            longest_stall_s=max((seen.stall_s for seen in report.requests), default=0.0),
            faults=len(self.windows),
            kinds=len({each.fault for each in self.windows}),
            recover_s=(slowest.recover_s or 0.0) if slowest else 0.0,
            slowest=slowest.fault if slowest else "",
            fits=fits,
            own_lag_s=report.own_lag_s,
            load_average=busy,
            wrong=[*wrong, *found],
        )


# -- What is told -----------------------------------------------------------------------------------------------------

HEADS: Final = (
    *("minutes", "faults", "kinds", "requests", "errors", "asked again", "longest wait, s", "longest stall, s"),
    *("longest recovery, s", "flat", "load average"),
)


def table(result: Result) -> str:
    """The row that the page has of a soak, and beside it the resources: of each the process that grew most."""
    flat = sum(each.is_flat for each in result.fits)
    cells = [
        *(f"{result.minutes:.0f}", str(result.faults), str(result.kinds), str(result.requests), str(result.errors)),
        *(str(result.asked_again), f"{result.longest_wait_s:.2f}", f"{result.longest_stall_s:.2f}"),
        *(f"{result.recover_s:.2f} ({result.slowest})", f"{flat} of {len(result.fits)}", f"{result.load_average:.1f}"),
    ]
    lines = [f"| {' | '.join(HEADS)} |", f"|{'---|' * len(HEADS)}", f"| {' | '.join(cells)} |", ""]
    lines += ["| resource | judged | grew most | median | most | grown | allowed |", "|---|---|---|---|---|---|---|"]
    for what, bound in BOUNDS.items():
        of_it = [each for each in result.fits if each.what == what]
        if not of_it:
            lines.append(f"| {what} | 0 | - | - | - | - | - |")
            continue
        worst = max(of_it, key=lambda each: each.grown - each.allowed)
        name = f"{what}, {bound.unit}" if bound.unit else what
        figures = (worst.median, worst.most, worst.grown, worst.allowed)
        lines.append(f"| {name} | {len(of_it)} | {worst.who} | {' | '.join(f'{each:.1f}' for each in figures)} |")
    return "\n".join(lines) + "\n"


def page(result: Result) -> str:
    """One page: the table, every broken promise, and what the bounds would have shown."""
    span_s = max((each.span_s for each in result.fits), default=0.0)
    asked = result.requests / (60.0 * result.minutes) * span_s / result.hubs
    verdict = [f"  {wrong}" for wrong in result.wrong[:25]] or ["  none"]
    if len(result.wrong) > 25:
        verdict.append(f"  and {len(result.wrong) - 25} more, in the JSON")
    leak = f"{1024 * BOUNDS['memory'].most / asked:.1f} KiB for each of its requests" if asked else "nothing"
    return "\n".join(
        [
            f"soak of {result.minutes:.1f} minutes, seed {result.seed}, hubs: {result.hubs}, load: {LOAD}",
            "",
            table(result),
            f"lines over {span_s:.0f} s; a hub that leaks {leak} passes the bound of memory",
            f"the clients' own process was held up for {result.own_lag_s:.2f} s at most",
            "",
            "broken promises:",
            *verdict,
            "",
        ]
    )
