"""From what is kept of a request to what is shown of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec

from hub.receipts.raw import (
    RETRY_BUDGET,
    SLOT,
    UNDER_WAY,
    DispatchMark,
    Ending,
    encode_receipt,
    line_of,
    picks_of,
    receipt_of,
)
from hub.request import events as ev
from omni_discovery.receipts.receipt import Receipt
from omni_discovery.wire import FailureKind
from tests.support.request_walk import Walk

ROWS = ((0, 7, 1, 1, 4, 1.0, -1, 0, True, False, "", 0.25), (1, 8, 0, 0, 4, 1.0, 2, -1, True, False, "cordoned", 0.0))


def mark(stage_id: int, attempt: int, at_s: float, what: str = "", **fields: Any) -> DispatchMark:
    snapshot = None if what else ("policy", 0, 7, 2, 1, ROWS, (0.5,), (), (0, 1))
    return DispatchMark(what, at_s, stage_id, attempt, at_s - 0.5, 12, snapshot=snapshot, **fields)


def shown(walk: Walk, *marks: DispatchMark, ending: Ending = UNDER_WAY) -> Receipt:
    return receipt_of(encoded(walk, *marks, ending=ending), "hub-1", "random")


def encoded(walk: Walk, *marks: DispatchMark, ending: Ending = UNDER_WAY) -> bytes:
    names = {"request_id": "r1~1", "shown_id": "r1", "label": "mine", "key": "alice", "parent_id": "", "role": ""}
    plan = walk.machine.state.plan
    request = SimpleNamespace(**names, priority=0, received_s=0.0, plan=plan)
    return encode_receipt(request, walk.machine, marks, {0: "f0", 1: "f1"}, ending, walk.now_s, 1000.0 + walk.now_s)


def failing_walk() -> Walk:
    """The first replica of stage 0 rejects, the second does it in three words; stage 1 fails."""
    walk = Walk(params={})
    walk.tell(ev.Submitted())
    walk.sent(0)
    walk.rejected(0, FailureKind.OVERLOADED)
    walk.accepted(0, replica_id=1)
    walk.words(0, "ab", "cd", "ef")
    walk.done(0, 3, to=[1])
    walk.accepted(1)
    walk.failed(1, FailureKind.ENGINE, "ValueError: the secret prompt")
    return walk


def test_each_attempt_has_its_moments_its_outcome_and_its_pick() -> None:
    walk = failing_walk()
    told = shown(walk, mark(0, 0, 2.0, host="h", version="v"), mark(0, 1, 4.0, bits=1), mark(1, 0, 10.0))
    assert [(each.stage, each.attempt, each.outcome) for each in told.attempts[:3]] == [
        (0, 0, "rejected"),
        (0, 1, "done"),
        (1, 0, "failed"),
    ]
    first, second, third = told.attempts[:3]
    assert (first.sent_s, first.ended_s, first.reason, first.is_retry) == (2.0, 3.0, "no", False)
    assert (second.accepted_s, second.first_output_s, second.modality, second.is_retry) == (5.0, 6.0, "text", True)
    assert (third.reason, third.view_revision) == ("engine: ValueError", 12)
    assert first.picking is not None
    assert [(each.replica, each.credits, each.out, each.host) for each in first.picking.candidates] == [
        ("0/0", None, "", "h"),
        ("0/1", 2, "cordoned", ""),
    ]
    assert told.fingerprints == ["f0", "f1"]
    assert (told.transfers[0].from_stage, told.transfers[0].to_stage) == (0, 1)


def test_waits_are_told_with_what_for_and_how_long() -> None:
    """It waits for a slot from 2 s, for the retry budget from 3 s, and leaves at 4 s."""
    walk = failing_walk()
    told = shown(walk, mark(0, 0, 2.0, SLOT), mark(0, 0, 3.0, RETRY_BUDGET), mark(0, 0, 4.0))
    waits = [(each.what, each.from_s, each.to_s) for each in told.attempts[0].waits]
    assert waits == [
        ("a free slot", 2.0, 3.0),
        ("the retry budget: retries are a fifth of all requests at most", 3.0, 4.0),
    ]


def test_an_attempt_that_runs_when_the_request_ends_was_aborted() -> None:
    walk = Walk(params={})
    walk.tell(ev.Submitted())
    walk.accepted(0)
    walk.tell(ev.Cancelled())
    told = shown(walk, mark(0, 0, 2.0), ending=Ending("cancelled"))
    assert (told.outcome, told.took_s, told.attempts[0].outcome) == ("cancelled", walk.now_s, "aborted")
    still = shown(walk, mark(0, 0, 2.0))
    assert (still.outcome, still.took_s, still.attempts[0].outcome) == ("", None, "")


def test_a_line_and_the_picks_are_read_from_the_same_bytes() -> None:
    kept = encoded(failing_walk(), mark(0, 0, 2.0), mark(0, 1, 4.0, SLOT), ending=Ending("failed", "StageError", 1))
    line = line_of(kept, "hub-1")
    assert (line.shown_id, line.outcome, line.error, line.replicas) == ("r1", "failed", "StageError", ["0/0"])
    assert line.error_stage == 1
    assert picks_of(kept) == [(0, 1002.0, 0, ROWS)]


def test_a_line_has_how_long_each_replica_worked_and_none_for_work_that_was_not_done() -> None:
    walk = failing_walk()
    done_s = next(at_s for at_s, kind, *_ in walk.machine.story.entries if kind.__name__ == "StageDone")
    line = line_of(encoded(walk, mark(0, 0, 2.0), mark(0, 1, done_s - 1.5), mark(1, 0, done_s)), "hub-1")
    assert (line.replicas, line.spans_s) == (["0/0", "0/0", "1/0"], [None, 1.5, None])


def test_nothing_that_an_engine_says_is_in_it() -> None:
    assert b"secret" not in encoded(failing_walk())
    assert b"secret" not in msgspec.json.encode(shown(failing_walk()))
