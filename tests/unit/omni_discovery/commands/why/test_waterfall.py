"""Receipts as text: eighty columns, no colour, and what to know first."""

from __future__ import annotations

import msgspec
import pytest

from omni_discovery.commands.top.pages import request_line
from omni_discovery.commands.why.waterfall import (
    clock,
    listed,
    replayed_line,
    replica_lines,
    seconds,
    size,
    waiting,
    waterfall,
)
from omni_discovery.receipts.receipt import (
    Candidate,
    Delay,
    Happening,
    Picking,
    Receipt,
    ReceiptLine,
    ReplicaReport,
    StageAttempt,
    Transfer,
    WaitingWork,
)
from omni_discovery.receipts.replay import Replayed

PICKED = Picking(
    policy="least-load",
    chosen="1/1",
    known=3,
    free=1,
    candidates=[
        Candidate(replica="1/0", out="it has failed this request, or was late with it"),
        Candidate(replica="1/1", load=1, capacity=4, credits=2, host="b"),
        Candidate(replica="1/2", out="cordoned"),
    ],
)
LOST = Receipt(
    request_id="mine~1",
    shown_id="mine",
    label="from-the-client",
    hub="hub-1",
    took_s=2.0,
    outcome="ok",
    stages=[0, 1],
    final_stages=[1],
    attempts=[
        StageAttempt(
            stage=0,
            attempt=0,
            replica="0/0",
            due_s=0.0,
            sent_s=0.5,
            first_output_s=0.75,
            ended_s=1.0,
            outcome="done",
            waits=[Delay(what="a free slot", from_s=0.0, to_s=0.5)],
        ),
        StageAttempt(
            stage=1,
            attempt=0,
            replica="1/0",
            due_s=1.0,
            sent_s=1.0,
            ended_s=1.25,
            outcome="lost",
            reason="its process is gone",
        ),
        StageAttempt(
            stage=1,
            attempt=1,
            replica="1/1",
            due_s=1.25,
            sent_s=1.25,
            first_output_s=1.5,
            ended_s=2.0,
            outcome="done",
            modality="audio",
            is_retry=True,
            continues=True,
            view_revision=12,
            picking=PICKED,
        ),
    ],
    transfers=[Transfer(from_stage=0, to_stage=1, connector="shm", pieces=3, size_bytes=2048, seconds=0.004)],
    events=[
        Happening(at_s=1.6, what="ClientBackpressure", detail="behind"),
        Happening(at_s=1.8, what="ClientBackpressure", detail="caught up"),
    ],
)


def test_a_request_is_a_waterfall_from_its_beginning_to_its_end() -> None:
    """It waited, was handed over, lost its replica, and went on elsewhere."""
    lines = waterfall(LOST, 80)
    assert lines[0] == "request mine"
    assert lines[1].startswith("  ok after 2.00 s, received ")
    assert lines[5:] == [
        "stage 0/0         ..........-----=====                       1.00 s done",
        "                  waited 500 ms for a free slot",
        "hand-off 0 -> 1   2.0 KiB in 3 pieces by shm, fetched in 4.0 ms",
        "stage 1/0                             -----                  250 ms lost",
        "                  lost: its process is gone",
        "stage 1/1 #1                               -----==========   750 ms done",
        "                  first sound at 1.50 s",
        "                  continued behind what the client had seen of the attempt",
        "                    before",
        "                  paused for 200 ms from 1.60 s on: the client was behind",
        "",
        "stage 1 attempt 1: 1/1 by least-load, of 1 free and 3 known, view at revision 12",
        "  * 1/1      load 1/4  credits 2  b",
        "    1/0      out: it has failed this request, or was late with it",
        "    1/2      out: cordoned",
    ]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, waterfall(LOST, width))) <= width


def test_a_request_under_way_ends_where_it_is_now() -> None:
    attempt = StageAttempt(stage=0, attempt=0, replica="0/0", due_s=0.0, sent_s=0.1)
    told = Receipt(request_id="r", took_s=None, attempts=[attempt], events=[Happening(at_s=0.4, what="Accepted")])
    lines = waterfall(told, 80)
    assert "still under way" in lines[1]
    assert lines[-1].endswith(" 400 ms runs")


def test_what_waits_is_told_by_cause_first() -> None:
    works = [WaitingWork(request_id=f"r{number}", stage=1, since_s=3.0, what="a free slot") for number in range(30)]
    lines = waiting([*works, WaitingWork(request_id="x", stage=0, what="the retry budget")], 80)
    assert lines[:3] == ["31 wait", "  30 at stage 1 for a free slot", "  1 at stage 0 for the retry budget"]
    assert lines[-1] == "  and 11 more: --json has them"
    assert waiting([], 80) == ["nothing waits"]
    unread = WaitingWork(request_id="r~1", shown_id="r", since_s=12.0, what="its client")
    assert waiting([unread], 80) == ["1 waits", "  1 for its client", "", "   12.00 s  answer   r"]


def test_a_replica_that_gets_nothing_is_told_why_and_what_to_do() -> None:
    now = Candidate(replica="1/2", load=0, capacity=4, out="cordoned", tier=-1, host="a")
    report = ReplicaReport(
        now=now, hub="hub-1", picks=9, left_out={"cordoned": 9}, why=["cordoned: omni cordon 1/2 --undo"]
    )
    lines = replica_lines(report, 80)
    assert lines[0] == "replica 1/2 on a, as hub hub-1 sees it"
    assert "  9 left it out: cordoned" in lines
    assert lines[-2:] == ["why:", "  cordoned: omni cordon 1/2 --undo"]


def test_failures_are_two_lines_each_and_a_third_says_why() -> None:
    line = ReceiptLine(
        request_id="r~1", shown_id="r", took_s=0.5, outcome="failed", error="ReplicaLostError", replicas=["0/1"]
    )
    lines = listed([line], 80)
    assert lines[0].endswith("  r")
    assert lines[1:] == ["    failed after 500 ms, ReplicaLostError, went to 0/1"]
    told = listed([msgspec.structs.replace(line, reason="its process\nis gone")], 80)
    assert told == [*lines, "    at last: its process is gone"]


@pytest.mark.parametrize(
    ("replayed", "text"),
    [
        (Replayed("1/1"), "least-load chose 1/1, and chooses it again"),
        (Replayed("1/0"), "least-load chose 1/1 then, and now 1/0"),
        (Replayed(lacks="chance"), "1/1 then; can't be made again, the receipt lacks chance"),
    ],
)
def test_a_replay_says_whether_it_is_the_same(replayed: Replayed, text: str) -> None:
    assert replayed_line(LOST.attempts[2], replayed) == f"stage 1 attempt 1: {text}"


def test_numbers_are_short() -> None:
    assert [seconds(each) for each in (0.00123, 0.25, 1.5, 250)] == ["1.2 ms", "250 ms", "1.50 s", "250 s"]
    assert [size(each) for each in (5, 2048, 3 << 20, 5 << 30)] == ["5 B", "2.0 KiB", "3.0 MiB", "5.0 GiB"]


@pytest.mark.attack("Z23")
@pytest.mark.parametrize("count", [10**400, -(10**400), 7], ids=["huge", "hugely negative", "usual"])
@pytest.mark.parametrize("number", [1e308, -1e308, 5e-324, -1.0, 0.0, 1e11, 2.5e11])
def test_whatever_numbers_a_hub_says_are_lines_of_text(number: float, count: int) -> None:
    """One hub that says nonsense must not hide what the others say; ``omni top`` shows the same lines."""
    picking = Picking(
        chosen="0/0", known=count, cut=count, candidates=[Candidate(replica="0/0", load=count, weight=number)]
    )
    attempt = StageAttempt(
        stage=count,
        attempt=count,
        due_s=0.5,
        sent_s=number,
        first_output_s=-number,
        first_piece_s=number,
        ended_s=number,
        waits=[Delay(what="a free slot", from_s=-number, to_s=number)],
        picking=picking,
    )
    told = Receipt(
        request_id="r",
        received_at=number,
        took_s=number,
        attempts=[attempt, msgspec.structs.replace(attempt, ended_s=None, sent_s=-number)],
        transfers=[Transfer(from_stage=0, to_stage=count, size_bytes=count, seconds=number)],
        events=[Happening(at_s=number, what="ClientBackpressure", detail="behind")],
    )
    line = ReceiptLine(request_id="r", received_at=number, took_s=number)
    report = ReplicaReport(now=picking.candidates[0], last_chosen_at=number)
    assert waterfall(told, 80)
    assert waterfall(msgspec.structs.replace(told, took_s=None), 80)
    assert listed([line], 80)[0].endswith("  r")
    assert request_line(line, 80)
    assert waiting([WaitingWork(request_id="r", stage=count, since_s=number, what="a slot")], 80)
    assert replica_lines(report, 80)


def test_a_moment_that_no_calendar_has_is_question_marks() -> None:
    assert [clock(each) for each in (1e308, -1e308, 1e12)] == ["????-??-?? ??:??:??"] * 3
    assert clock(1e9)[:5] == "2001-"
