"""What a row says, how rows are sorted and filtered, and which columns fit."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from omni_discovery.commands.top import rows
from omni_discovery.commands.top.rows import (
    UNKNOWN,
    Choice,
    Moment,
    Order,
    columns,
    event_line,
    fitted,
    groups,
    headline,
    length,
    rate,
)
from omni_discovery.commands.top.traffic import Pace, Traffic
from omni_discovery.deploy import fingerprint
from omni_discovery.deploy.document import DeployConfig, decode_deploy
from omni_discovery.deploy.fingerprint import stage_fingerprints
from omni_discovery.kv import LeaseTime
from omni_discovery.records.beat import BeatRecord
from omni_discovery.records.health import HubHealth, ReplicaTrouble, StageLoad, TroubleKind
from omni_discovery.records.schema import HubRecord, ReplicaInfo, ReplicaStatus
from omni_discovery.view.hub_reports import HubReports, read_reports
from omni_discovery.view.recent_events import ShownEvent, Tone
from omni_discovery.view.table import View
from tests.support.terminal import HOSTILE

NOW = 1000.0
DOCUMENT = b"""{"model": "m", "stages": [
  {"stage_id": 0, "engine": "echo", "runtime": {"num_replicas": 3}},
  {"stage_id": 1, "engine": "echo", "final_output": "text"}
]}"""


def info(stage_id: int, replica_id: int, **changes: Any) -> ReplicaInfo:
    usual = ReplicaInfo("tcp://h:1", "tcp://h:2", stage_id, ReplicaStatus.UP, 0, NOW - 1, NOW - 60, replica_id)
    return replace(usual, **{"epoch": 5, "capacity": 4, "host": "alpha", "version": "0.2.0", **changes})


def view(*infos: ReplicaInfo, **more: Any) -> View:
    replicas = {(each.stage_id, each.replica_id): each for each in infos}
    return View(replicas=MappingProxyType(replicas), revision=9, **more)


def reports(shown: View, health: HubHealth | None) -> HubReports:
    beat = BeatRecord() if health is None else BeatRecord(health=health)
    return read_reports(replace(shown, hubs={"h1": HubRecord(hub_id="h1")}), {"h1": beat})


def states(*infos: ReplicaInfo, health: HubHealth | None = None) -> list[tuple[Tone, str]]:
    shown = view(*infos)
    [group] = groups(Moment(shown, NOW, reports(shown, health)), Choice())
    return [(row.tone, row.state) for row in group.rows]


def test_a_state_is_said_in_words_beside_its_colour() -> None:
    assert states(
        info(0, 0),
        info(0, 1, cordoned=True),
        info(0, 2, weight=0.0),
        info(0, 3, weight=0.5),
        info(0, 4, status=ReplicaStatus.STARTING, phase="loading", progress=0.4),
        info(0, 5, status=ReplicaStatus.ERROR, reason="out of memory"),
        info(0, 6, leased=False),
    ) == [
        (Tone.GOOD, "up"),
        (Tone.WARN, "up, cordoned"),
        (Tone.WARN, "up, weight 0"),
        (Tone.GOOD, "up, weight 0.5"),
        (Tone.QUIET, "starting 40% loading"),
        (Tone.BAD, "error: out of memory"),
        (Tone.BAD, "up, no lease"),
    ]


def test_what_hubs_see_of_a_replica_is_no_good_state() -> None:
    trouble = ReplicaTrouble(stage_id=0, replica_id=0, epoch=5, kind=TroubleKind.EJECTED)
    assert states(info(0, 0), health=HubHealth(troubles=[trouble])) == [(Tone.BAD, "up, ejected")]


def test_what_a_lease_has_left_is_told_and_a_missed_renewal_in_words() -> None:
    """A lease is renewed each third: of 10 s, 6 are left after one, and 3 only where the next two have not come."""
    infos = [info(0, number, lease_id=number + 1) for number in range(3)] + [info(0, 3, leased=False)]
    leases = {1: LeaseTime(6.0, 10.0), 2: LeaseTime(3.0, 10.0)}
    [group] = groups(Moment(view(*infos), NOW, leases=leases), Choice())
    [column] = [each for each in columns(80) if each.title == "lease"]
    assert [column.of_replica(row) for row in group.rows] == ["6 s", "3 s", UNKNOWN, "none"]
    assert [row.state for row in group.rows] == ["up", "up, not renewed", "up", "up, no lease"]
    assert [row.tone for row in group.rows] == [Tone.GOOD, Tone.BAD, Tone.GOOD, Tone.BAD]


def test_a_rollout_counts_down_what_still_runs_another_document() -> None:
    right = stage_fingerprints(decode_deploy(DOCUMENT, ""))[0]
    old, new = info(0, 0, fingerprint="0" * 16), info(0, 1, fingerprint=right)
    moment = Moment(view(old, new, pipeline=DOCUMENT), NOW)
    assert [row.state for row in groups(moment, Choice())[0].rows] == ["up, other document", "up"]
    assert "rollout: 1 of 2 left" in headline(moment, Choice(), "n")
    assert "rollout" not in headline(Moment(view(new, pipeline=DOCUMENT), NOW), Choice(), "n")


def test_stages_are_groups_and_one_without_replicas_is_one_too() -> None:
    shown = view(info(0, 0, queue_length=6), info(0, 1, cordoned=True), info(2, 0), pipeline=DOCUMENT)
    found = groups(Moment(shown, NOW), Choice())
    assert [(each.stage_id, each.engine, each.wanted, each.able, each.registered) for each in found] == [
        (0, "echo", 3, 1, 2),
        (1, "echo", 1, 0, 0),
        (2, "", None, 1, 1),
    ]
    assert (found[0].busy, found[0].slots, found[0].rows[0].busy, found[0].rows[0].waiting) == (4, 4, 4, 2)


def test_what_waits_is_unknown_unless_each_hub_says_it() -> None:
    shown = view(info(0, 0))
    load = HubHealth(loads=[StageLoad(stage_id=0, waiting=7)])

    def waiting(known: HubReports | None) -> int | None:
        return groups(Moment(shown, NOW, known), Choice())[0].waiting

    assert waiting(None) is None
    assert waiting(reports(shown, None)) is None, "an older hub"
    assert waiting(reports(shown, HubHealth())) is None, "a hub that does not count it"
    assert waiting(reports(shown, load)) == 7


def test_rows_are_sorted_within_their_stage_and_the_unknown_stays_last() -> None:
    shown = view(info(0, 0), info(0, 1, queue_length=4), info(0, 2, queue_length=2, cordoned=True))
    traffic = Traffic({"0/1": Pace(2.0, 0.1, 0.9), "0/2": Pace(5.0, 0.1, 0.3)}, hubs=1, known=2)
    moment = Moment(shown, NOW, traffic=traffic)

    def order(by: Order, *, reverse: bool = False) -> list[int]:
        return [row.info.replica_id for row in groups(moment, Choice(by, reverse))[0].rows]

    assert order(Order.NAME) == [0, 1, 2]
    assert order(Order.NAME, reverse=True) == [2, 1, 0]
    assert order(Order.STATE) == [2, 0, 1]
    assert order(Order.BUSY) == [1, 2, 0]
    assert order(Order.RATE) == [2, 1, 0]
    assert order(Order.RATE, reverse=True) == [1, 2, 0]
    assert order(Order.P99) == [1, 2, 0]
    assert order(Order.AGE, reverse=True) == [0, 1, 2]


def test_the_next_order_is_each_of_them_in_turn() -> None:
    seen, order = [], Order.NAME
    for _ in Order:
        seen.append(order)
        order = order.next()
    assert (seen, order) == (list(Order), Order.NAME)


@pytest.mark.parametrize(
    ("needle", "names"),
    [
        ("", ["0/0", "0/1", "1/0"]),
        ("BETA", ["0/1"]),
        ("stage 1", ["1/0"]),
        (" stage 0 echo ", ["0/0", "0/1"]),
        ("1/", ["1/0"]),
        ("lost", ["0/1"]),
        ("nothing", []),
    ],
)
def test_a_filter_is_a_part_of_what_a_row_says(needle: str, names: list[str]) -> None:
    shown = view(info(0, 0), info(0, 1, host="beta"), info(1, 0), pipeline=DOCUMENT)
    found = groups(Moment(shown, NOW, ends={(0, 1): "lost"}), Choice(needle=needle))
    assert [row.name for group in found for row in group.rows] == names


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_the_columns_fill_a_terminal_and_never_more(width: int) -> None:
    chosen = columns(width)
    used = sum(each.width for each in chosen) + len(chosen) - 1
    assert used <= width
    assert [each.title for each in chosen[:8]] == ["replica", "state", "busy", "waits", "rate", "p50", "p99", "lease"]


def test_what_is_not_known_is_a_dash() -> None:
    shown = view(info(0, 0, last_heartbeat=0.0, version="", host="", device=""))
    [group] = groups(Moment(shown, NOW), Choice())
    cells = {each.title: each.of_replica(group.rows[0]) for each in columns(200)}
    unknown = {title for title, cell in cells.items() if cell == UNKNOWN}
    assert unknown == {"rate", "p50", "p99", "lease", "wrote", "last end", "version", "host", "device"}
    assert {each.title: each.of_stage(group) for each in columns(80)}["waits"] == UNKNOWN


def test_a_stage_with_nobody_says_so() -> None:
    found = groups(Moment(view(pipeline=DOCUMENT), NOW), Choice())
    assert columns(80)[1].of_stage(found[0]) == "nobody of 3: requests wait"


def test_lengths_and_rates_are_short() -> None:
    assert [length(value) for value in (None, 0.0004, 0.0204, 0.9996, 1.25, 120.0)] == [
        *("-", "0 ms", "20 ms", "1.0 s", "1.2 s", "120 s")
    ]
    assert [rate(value) for value in (None, 0.0, 0.01, 0.25, 12.4)] == ["-", "0/s", "<0.1/s", "0.2/s", "12/s"]


def test_a_cell_is_as_wide_as_its_column() -> None:
    column = columns(80)[1]
    assert fitted("up", column) == "up".ljust(column.width)
    assert fitted("x" * 99, column) == "x" * (column.width - 1) + "…"


@pytest.mark.attack("A18")
def test_no_cell_and_no_line_says_anything_to_a_terminal() -> None:
    shown = view(info(0, 0, phase=HOSTILE, status=ReplicaStatus.STARTING, reason=HOSTILE, host=HOSTILE))
    [group] = groups(Moment(shown, NOW, ends={(0, 0): HOSTILE}), Choice())
    lines = [fitted(each.of_replica(group.rows[0]), each) for each in columns(200)]
    event = ShownEvent(number=1, at=NOW, tone=Tone.BAD, about=HOSTILE, text=HOSTILE)
    lines += [event_line(event, "12:00:00", 200), headline(Moment(shown, NOW), Choice(needle=HOSTILE), "n")]
    assert all(line.isprintable() for line in lines)


def test_the_headline_says_how_old_the_view_is_and_whose_rates_are_known() -> None:
    old = view(info(0, 0), stale_since_s=NOW - 12)
    moment = Moment(old, NOW, traffic=Traffic(hubs=1, known=2))
    text = headline(moment, Choice(Order.P99, reverse=True, needle="up"), "n", "a hub wants its token")
    assert text == (
        "n: 1 replica, 0 hubs · view 12 s old · by p99 reversed · rates of 1 of 2 hubs · filter up"
        " · a hub wants its token"
    )
    assert headline(Moment(View(), NOW), Choice(), "n") == "n: 0 replicas, 0 hubs · waiting for etcd · by name"


def test_a_bad_event_has_a_mark_beside_its_colour() -> None:
    event = ShownEvent(number=1, at=NOW, tone=Tone.BAD, about="0/1", text="is lost: its record is gone")
    assert event_line(event, "12:00:00", 80) == "12:00:00 ! 0/1 is lost: its record is gone"
    assert event_line(event, "12:00:00", 20) == "12:00:00 ! 0/1 is l…"


@pytest.mark.attack("V9")
def test_a_document_is_decoded_once_and_not_for_each_drawing_of_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a megabyte takes half a second; the screen is drawn twice a second, and reads no keys meanwhile."""
    decoded: list[str] = []

    def counting(pipeline: bytes, source: str) -> DeployConfig:
        decoded.append(source)
        return decode_deploy(pipeline, source)

    for module in (rows, fingerprint):
        monkeypatch.setattr(module, "decode_deploy", counting)
    for end in (b" ", b"  "):
        moment = Moment(view(info(0, 0), pipeline=DOCUMENT + end), NOW)
        for _ in range(5):
            assert groups(moment, Choice())
            assert headline(moment, Choice(), "n")
    assert len(decoded) <= 4


@pytest.mark.attack("X2")
def test_thousands_of_replicas_in_error_are_counted_and_only_some_are_drawn() -> None:
    """1. each stage has its share of what is shown; 2. the headline counts the others; 3. a filter finds any of them"""
    failed: dict[str, Any] = {"status": ReplicaStatus.ERROR, "reason": "é" * 999}
    infos = [info(stage_id, at, **failed) for stage_id in (0, 1) for at in range(3000)]
    moment = Moment(view(*infos), NOW)
    found = groups(moment, Choice())
    assert [(len(group.rows), group.left_out, group.registered) for group in found] == [(500, 2500, 3000)] * 2
    assert "5000 rows left out: / filters" in headline(moment, Choice(), "n", left_out=5000)
    [group] = groups(moment, Choice(needle="1/2999"))
    assert [row.name for row in group.rows] == ["1/2999"]
    assert max(len(row.state) for group in found for row in group.rows) < 250
