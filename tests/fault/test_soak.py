"""What judges a soak: lines through what is held, answers by the fault under which they were given, and the page."""

from __future__ import annotations

import os
import threading
import time
from itertools import islice
from pathlib import Path
from random import Random
from typing import cast

import pytest

from tests.fault.faults import Fault
from tests.fault.flat import BOUNDS, LEAST_SAMPLES, Fit, fit, line_of
from tests.fault.judge import Promise
from tests.fault.load import LOADS, Report, Seen
from tests.fault.samples import held_by
from tests.fault.site import HUBS, Site
from tests.fault.soak import (
    LOAD,
    RECEIPTS,
    SETTLING,
    Result,
    Soak,
    Window,
    drawn,
    judge_growth,
    judge_requests,
    judge_windows,
    page,
    table,
)

GOOD = Seen(1, asked_s=9.0, first_after_s=0.1, stall_s=0.2, stalled_at_s=10.5, ended_s=11.0)
QUIET = Window(fault="etcd-down", broke_s=100.0, healed_s=110.0, whole_s=111.0, promise=Promise(), load_average=1.0)
TAKEN = Window(
    fault="hub-killed",
    broke_s=200.0,
    healed_s=201.0,
    whole_s=205.0,
    promise=Promise(stall_s=2.0, takes_a_hub=True),
    load_average=1.0,
)


def series(
    value_at: dict[int, float] | None = None, *, count: int = 100, slope: float = 0.0
) -> list[tuple[float, float]]:
    """A sample every 5 s around 100, rising by ``slope`` each second, with these values instead at some places."""
    dice = Random(1)
    points = [(5.0 * place, 100.0 + dice.uniform(-1.0, 1.0) + slope * 5.0 * place) for place in range(count)]
    return [(at_s, (value_at or {}).get(place, value)) for place, (at_s, value) in enumerate(points)]


def fitted(points: list[tuple[float, float]], what: str = "memory") -> Fit:
    found = fit("hub b", what, points, 60.0)
    assert found is not None
    return found


def test_what_stays_is_flat_and_what_rises_is_not() -> None:
    flat = fitted(series())
    assert flat.is_flat
    assert abs(flat.grown) < 1.0
    rising = fitted(series(slope=0.02))
    assert not rising.is_flat
    assert rising.grown == pytest.approx(0.02 * 495.0, abs=1.0)
    assert rising.per_hour == pytest.approx(72.0, abs=8.0)
    assert "hub b: memory grew by" in line_of(rising)


def test_memory_that_is_free_again_after_minutes_has_not_grown_and_a_leak_below_it_is_found() -> None:
    """As malloc keeps what a large request took, until some other one makes it look."""

    def kept(at_s: float) -> float:
        return 100.0 + 14.0 * (300 < at_s < 580 or at_s > 850)

    steps = [(5.0 * at, kept(5.0 * at)) for at in range(180)]
    seen = fit("replica", "memory", steps, 60.0)
    assert seen is not None
    assert (seen.is_flat, seen.most) == (True, 114.0)
    leaking = fit("replica", "memory", [(at_s, value + at_s / 150) for at_s, value in steps], 60.0)
    assert leaking is not None
    assert not leaking.is_flat


def test_what_sinks_is_flat() -> None:
    assert fitted(series(slope=-0.1)).is_flat


def test_moments_of_a_fault_bend_no_line() -> None:
    """One sample in five is three times as high, more of them late than early."""
    spikes = dict.fromkeys((3, 40, *range(60, 100, 3)), 300.0)
    assert fitted(series(spikes)).is_flat


def test_a_leak_by_one_with_each_fault_is_found() -> None:
    """A descriptor for each of a hundred faults."""
    steps = [(5.0 * place, 40.0 + place // 4) for place in range(400)]
    assert not fitted(steps, "descriptors").is_flat


def test_too_few_or_too_short_is_not_judged() -> None:
    assert fit("hub b", "memory", series(count=LEAST_SAMPLES - 1), 1.0) is None
    assert fit("hub b", "memory", series(), 600.0) is None
    assert fit("hub b", "memory", [], 0.0) is None


def test_a_soak_in_which_a_kind_of_process_is_not_judged_is_no_proof() -> None:
    whole = [fitted(series())]
    said = judge_growth(whole)
    assert [line for line in said if "lived long enough" in line] == [
        f"no {kind} lived long enough to be judged" for kind in ("supervisor", "replica 0")
    ]


def test_receipts_have_filled_their_ring_before_the_lines_of_half_an_hour_begin() -> None:
    """With three hubs, and twice over: a hub gets less while it is taken."""
    assert LOADS[LOAD].rate / len(HUBS) * SETTLING * 30.0 * 60.0 >= 2 * RECEIPTS


def test_every_fault_comes_once_before_any_comes_twice() -> None:
    names = ["a", "b", "c", "d"]
    order = list(islice(drawn(names, Random(3)), 12))
    assert [sorted(order[at : at + 4]) for at in (0, 4, 8)] == [names] * 3
    assert order == list(islice(drawn(names, Random(3)), 12)), "a seed is a plan"
    assert order[:4] != order[4:8]


def requests(*seen: Seen) -> list[str]:
    return judge_requests(Report([GOOD, *seen], 0.0), [QUIET, TAKEN], 0.0)


def test_good_answers_are_good() -> None:
    assert requests() == []
    assert judge_requests(Report([], 0.0), [], 0.0) == ["nothing was asked"]


def test_an_error_is_one_under_any_fault() -> None:
    assert requests(Seen(2, asked_s=200.5, ended_s=230.0, error="wrong answer")) == [
        "request 2: wrong answer (hub-killed)"
    ]


def test_answers_break_rightly_only_where_a_hub_is_taken() -> None:
    assert requests(Seen(2, asked_s=199.0, ended_s=201.5, broken=1, causes=["EOFError"])) == []
    assert requests(Seen(2, asked_s=206.0, ended_s=207.0, refused=1)) == []
    assert requests(Seen(2, asked_s=101.0, ended_s=102.0, broken=1, causes=["EOFError"])) == [
        "request 2 broke: EOFError (etcd-down)"
    ]
    assert requests(Seen(2, asked_s=300.0, ended_s=301.0, broken=1, causes=["EOFError"])) == [
        "request 2 broke: EOFError (no fault)"
    ]
    assert requests(Seen(2, asked_s=300.0, ended_s=301.0, refused=1)) == ["request 2 was told to come later (no fault)"]


def test_a_stall_is_judged_by_the_fault_in_which_it_was() -> None:
    def still(at_s: float, stall_s: float) -> Seen:
        return Seen(2, asked_s=at_s, first_after_s=0.1, stall_s=stall_s, stalled_at_s=at_s, ended_s=at_s + stall_s)

    assert requests(still(200.0, 1.9)) == []
    assert requests(still(200.0, 2.1)) == ["request 2 stood still for 2.10 s; 2 s are promised (hub-killed)"]
    assert requests(still(100.0, 1.1)) == ["request 2 stood still for 1.10 s; 1 s are promised (etcd-down)"]
    assert requests(still(300.0, 1.1)) == ["request 2 stood still for 1.10 s; 1 s are promised (no fault)"]


def test_a_fault_that_could_not_be_made_or_did_not_heal_is_told() -> None:
    late = Window(fault="a", broke_s=0.0, healed_s=1.0, whole_s=9000.0, promise=Promise(), load_average=1.0)
    never = Window(
        fault="b", broke_s=0.0, healed_s=1.0, whole_s=None, promise=Promise(), load_average=1.0, lacked="a hub"
    )
    failed = Window(
        fault="c", broke_s=0.0, healed_s=1.0, whole_s=1.0, promise=Promise(), load_average=1.0, failed="OSError: no"
    )
    assert judge_windows([QUIET, TAKEN]) == []
    said = judge_windows([late, never, failed])
    assert said[0].startswith("a: 8999.0 s to recover; 15 s are promised")
    assert said[1:] == ["b: the site did not recover: a hub", "c could not be made: OSError: no"]


def test_the_page_has_the_row_each_resource_and_what_was_broken() -> None:
    result = Result(
        minutes=30.0,
        seed=1,
        hubs=3,
        requests=7200,
        errors=0,
        asked_again=12,
        longest_wait_s=9.0,
        longest_stall_s=4.4,
        faults=96,
        kinds=36,
        recover_s=8.8,
        slowest="hub-killed",
        fits=[fitted(series()), fitted(series(slope=0.02))],
        own_lag_s=0.1,
        load_average=2.0,
        wrong=["hub b: memory grew"],
    )
    said = page(result)
    assert "| 30 | 96 | 36 | 7200 | 0 | 12 | 9.00 | 4.40 | 8.80 (hub-killed) | 1 of 2 | 2.0 |" in said
    assert "  hub b: memory grew" in said
    assert all(what in table(result) for what in BOUNDS)


def test_what_a_process_holds_is_seen(tmp_path: Path) -> None:
    before = held_by(os.getpid())
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    with (tmp_path / "file").open("w"):
        now = held_by(os.getpid())
    stop.set()
    thread.join()
    assert set(now) == {"memory", "threads", "descriptors", "sockets", "shared memory"}
    assert now["threads"] == before["threads"] + 1
    assert now["descriptors"] == before["descriptors"] + 1
    assert now["memory"] > 5.0
    assert held_by(2**22 + 1) == {}


def small_soak(monkeypatch: pytest.MonkeyPatch, **faults: Fault) -> Soak:
    """One whose site has always recovered, with no pauses."""
    monkeypatch.setattr("tests.fault.soak.whole_since", lambda site: time.monotonic())
    monkeypatch.setattr("tests.fault.soak.PAUSES_S", (0.0, 0.0))
    return Soak(cast("Site", None), faults, 1.0, 1)


def test_a_fault_that_can_not_be_made_is_healed_told_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def fail(site: Site) -> None:
        raise OSError("no room")

    bad = Fault(break_it=fail, heal=lambda site: said.append("heal bad"))
    good = Fault(break_it=lambda site: said.append("break good"))
    soak = small_soak(monkeypatch, bad=bad, good=good)
    soak._break_again_and_again(time.monotonic() + 60.0, lambda window: soak.stop() if len(soak.windows) == 4 else None)
    assert sorted(said) == ["break good"] * 2 + ["heal bad"] * 2
    assert {(each.fault, each.failed) for each in soak.windows} == {("bad", "OSError: no room"), ("good", "")}


def test_told_to_stop_it_waits_no_longer_for_a_fault_and_makes_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    long = Fault(break_it=lambda site: soak.stop(), heal=lambda site: said.append("healed"), lasts_s=600.0)
    soak = small_soak(monkeypatch, long=long)
    began_s = time.monotonic()
    soak._break_again_and_again(began_s + 60.0, lambda window: None)
    assert time.monotonic() - began_s < 30.0
    assert said == ["healed"]
    assert len(soak.windows) == 1


def test_what_does_not_recover_ends_a_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    soak = small_soak(monkeypatch, one=Fault(break_it=lambda site: None))
    monkeypatch.setattr("tests.fault.soak.whole_since", lambda site: None)
    monkeypatch.setattr("tests.fault.soak._lack_of", lambda site: "a hub")
    soak._break_again_and_again(time.monotonic() + 60.0, lambda window: None)
    assert judge_windows(soak.windows) == ["one: the site did not recover: a hub"]
