"""RequestMachine when replicas die, refuse or break; and in any order of events at all."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hub.request import events as ev
from hub.request.retry import ENGINE_DIED
from omni_discovery import wire
from omni_discovery.errors import (
    EngineFailedError,
    InvalidRequestError,
    OverloadedError,
    ReplicaLostError,
    StageUnavailableError,
)
from omni_discovery.wire import FailureKind
from tests.support.request_walk import (
    BRANCHING,
    PAIR,
    Heard,
    Walk,
    accepted,
    at_picture,
    chunk,
    done,
    failed,
    finish_of,
    heard,
    of,
    rejected,
)

# ---- loss


def test_a_replica_that_dies_before_output_is_replaced() -> None:
    walk = Walk()
    walk.tell(ev.Submitted())
    walk.accepted(0)
    actions = walk.lost(0)
    assert of(actions, ev.Dispatch)[0].attempt == 1
    # Its session is gone, so no pick finds it; should the session come back, it may serve after all.
    assert of(actions, ev.Dispatch)[0].avoid == frozenset()
    assert of(actions, ev.Abort)[0].replica.replica_id == 0


def test_text_without_token_ids_that_was_shown_ends_the_request() -> None:
    walk = Walk()
    walk.tell(ev.Submitted())
    walk.accepted(0)
    walk.chunk(0, 0)
    error = finish_of(walk.lost(0)).error
    assert isinstance(error, ReplicaLostError)
    assert "stage 0 replica 0/0: it died; part of the output was shown, and without token ids" in str(error)


def test_a_send_that_failed_is_no_abort_and_goes_elsewhere() -> None:
    walk = Walk()
    walk.tell(ev.Submitted())
    actions = walk.lost(0, may_have_run=False, avoid_addr="tcp://full:1")
    assert of(actions, ev.Abort) == []
    assert of(actions, ev.Dispatch)[0].avoid == {"tcp://full:1"}


@pytest.mark.parametrize("kind", [FailureKind.OVERLOADED, FailureKind.DRAINING, FailureKind.ENGINE])
def test_a_rejection_goes_to_another_replica(kind: FailureKind) -> None:
    walk = Walk()
    walk.tell(ev.Submitted())
    walk.sent(0)
    (_, dispatch) = walk.rejected(0, kind)
    assert (dispatch.attempt, dispatch.avoid) == (1, {"tcp://0-0:1"})


def test_an_invalid_request_is_not_tried_twice() -> None:
    walk = Walk()
    walk.tell(ev.Submitted())
    walk.sent(0)
    assert isinstance(finish_of(walk.rejected(0, FailureKind.INVALID)).error, InvalidRequestError)


def test_attempts_are_bounded_and_the_last_reason_is_told() -> None:
    walk = Walk(attempts=3)
    walk.tell(ev.Submitted())
    for number in range(3):
        walk.accepted(0, replica_id=number)
        actions = walk.failed(0, FailureKind.ENGINE)
    error = finish_of(actions).error
    assert isinstance(error, EngineFailedError)
    assert "0/2: it broke" in str(error)


def test_a_full_stage_is_told_as_overload_once_nobody_else_is_there() -> None:
    walk = Walk()
    walk.tell(ev.Submitted())
    walk.sent(0)
    walk.rejected(0, FailureKind.OVERLOADED)
    actions = walk.tell(ev.StageUnavailable(0, 1, "nobody else"))
    assert isinstance(finish_of(actions).error, OverloadedError)


def test_a_stage_without_replicas_is_told_as_such() -> None:
    walk = Walk()
    walk.tell(ev.Submitted())
    error = finish_of(walk.tell(ev.StageUnavailable(0, 0, "no UP replica for stage 0 after 10.0s"))).error
    assert isinstance(error, StageUnavailableError)
    assert str(error) == "no UP replica for stage 0 after 10.0s"


def test_an_unasked_abort_by_the_replica_is_a_loss() -> None:
    walk = Walk()
    walk.tell(ev.Submitted())
    walk.accepted(0)
    assert of(walk.done(0, 0, reason="abort"), ev.Dispatch)[0].attempt == 1


def test_a_painter_that_dies_before_it_accepts_is_replaced_with_the_same_handoff() -> None:
    walk = Walk(modalities=["image"])
    walk.tell(ev.Submitted())
    walk.accepted(0)
    walk.done(0, 0, to=[1])
    walk.sent(1)
    (dispatch,) = of(walk.lost(1), ev.Dispatch)
    assert (dispatch.stage_id, dispatch.attempt, len(dispatch.payloads)) == (1, 1, 1)


def test_a_painter_that_dies_at_work_is_replaced_from_the_kept_handoff() -> None:
    """1. the painter dies after it took the hand-off: another gets the same one, the thinker is left alone
    2. that hand-off is gone with the thinker's replica, and nothing was shown: the thinker begins anew
    3. the second hand-off goes to a painter and the request ends well; both are released
    """
    walk = at_picture(["image"])
    (dispatch,) = of(walk.lost(1), ev.Dispatch)
    assert (dispatch.stage_id, dispatch.attempt, dispatch.payloads[0].key) == (1, 1, "0-1")
    walk.accepted(1, replica_id=1)
    actions = walk.failed(1, FailureKind.PAYLOAD)
    assert of(actions, ev.Retry) == [ev.Retry(1)]
    (dispatch,) = of(actions, ev.Dispatch)
    assert (dispatch.stage_id, dispatch.attempt, dispatch.is_retry) == (0, 1, True)
    assert [action.stage_id for action in of(actions, ev.ReleasePayload)] == [0]
    walk.accepted(0, replica_id=5)
    assert [action.stage_id for action in of(walk.done(0, 0, to=[1]), ev.Dispatch)] == [1]
    walk.accepted(1, replica_id=1)
    actions = walk.done(1, 0)
    assert finish_of(actions).outcome is ev.Outcome.OK
    assert [action.replica.replica_id for action in of(actions, ev.ReleasePayload)] == [5]


def test_a_painter_that_dies_after_text_was_shown_is_replaced_if_the_handoff_is_still_there() -> None:
    walk = at_picture()
    (dispatch,) = of(walk.lost(1), ev.Dispatch)
    assert (dispatch.stage_id, dispatch.attempt) == (1, 1)
    walk.accepted(1, replica_id=1)
    assert finish_of(walk.done(1, 0)).outcome is ev.Outcome.OK


def test_text_that_was_shown_and_a_handoff_that_is_gone_end_the_request() -> None:
    walk = at_picture()
    walk.lost(1)
    walk.accepted(1, replica_id=1)
    error = finish_of(walk.failed(1, FailureKind.PAYLOAD)).error
    assert isinstance(error, ReplicaLostError)
    assert "was shown already" in str(error)


def test_a_handoff_that_its_maker_could_not_store_is_no_handoff_that_is_gone() -> None:
    """The first stage takes none: it is simply done again, or continued, elsewhere."""
    walk = Walk()
    walk.tell(ev.Submitted())
    walk.accepted(0)
    walk.words(0, "one")
    (dispatch,) = of(walk.failed(0, FailureKind.PAYLOAD), ev.Dispatch)
    assert (dispatch.stage_id, dispatch.resume) == (0, wire.Resume(token_ids=(3,), text="one"))


def test_an_attempt_that_was_given_up_may_have_left_a_handoff_that_is_released_at_the_end() -> None:
    """1. the thinker's replica is lost, and may have finished unheard
    2. another does the work; at the end both are told to release
    """
    walk = Walk(modalities=["image"])
    walk.tell(ev.Submitted())
    walk.accepted(0)
    walk.lost(0)
    walk.accepted(0, replica_id=1)
    walk.done(0, 0, to=[1])
    walk.accepted(1)
    actions = walk.done(1, 0)
    assert [action.replica.replica_id for action in of(actions, ev.ReleasePayload)] == [0, 1]


def test_a_running_stage_that_is_aborted_is_told_to_release_too() -> None:
    """Its end may be on the way already."""
    walk = Walk()
    walk.tell(ev.Submitted())
    walk.accepted(0)
    assert [type(action) for action in walk.tell(ev.Cancelled())][:2] == [ev.Abort, ev.ReleasePayload]


# ---- any order at all

_stages = st.integers(0, 4)
_attempts = st.sampled_from([0, 0, -1])
_kinds = st.sampled_from(FailureKind)


@st.composite
def events(draw: st.DrawFn) -> tuple[str, int, int, Any]:
    """A step: what happens, at which stage, how far from the current attempt, and a detail."""
    name = draw(st.sampled_from(["sent", "accepted", "chunk", "done", "rejected", "failed", "lost", "nobody"]))
    detail = draw({"rejected": _kinds, "failed": _kinds}.get(name, st.sampled_from([0, 0, 0, 1, -1])))
    return name, draw(_stages), draw(_attempts), detail


def piece_of(walk: Walk, stage_id: int, attempt: int, seq: int, style: str) -> Heard:
    """A piece of the only output that the stage's model knows: its pieces are their own numbers."""
    resumed = [
        len(action.resume.token_ids)
        for action in of(walk.actions, ev.Dispatch)
        if (action.stage_id, action.attempt) == (stage_id, attempt) and action.resume is not None
    ]
    number = seq + sum(resumed)
    if style == "picture":
        return heard(stage_id, attempt, chunk(seq, ""), [str(number).encode()])
    return heard(stage_id, attempt, chunk(seq, str(number), [number] if style == "tokens" else ()))


def event_of(walk: Walk, step: tuple[str, int, int, Any], style: str) -> ev.Event | Heard:
    name, stage_id, back, detail = step
    run = walk.machine.runs.get(stage_id)
    attempt = (run.attempt if run else 0) + back
    seq = max(0, (run.next_seq if run else 0) + (detail if isinstance(detail, int) else 0))
    match name:
        case "sent":
            return ev.Sent(stage_id, attempt, ev.ReplicaRef(stage_id, attempt, 7, f"tcp://{stage_id}-{attempt}:1"))
        case "accepted":
            return accepted(stage_id, attempt)
        case "chunk":
            return piece_of(walk, stage_id, attempt, seq, style)
        case "done":
            targets = [1, 2, 3] if detail >= 0 else [1]
            return heard(stage_id, attempt, done(stage_id, seq, targets))
        case "rejected":
            return rejected(stage_id, attempt, detail, "no")
        case "failed":
            return failed(stage_id, attempt, detail, "broke")
        case "lost":
            return ev.ReplicaLost(stage_id, attempt, "died", may_have_run=detail == 0)
        case _:
            return ev.StageUnavailable(stage_id, attempt, "nobody")


@settings(max_examples=300, deadline=None)
@given(
    st.lists(events(), max_size=60),
    st.sampled_from([PAIR, BRANCHING]),
    st.sampled_from([None, ["text"], ["image"]]),
    st.sampled_from([ev.Cancelled(), ev.DeadlinePassed()]),
    st.sampled_from(["text", "tokens", "picture"]),
)
def test_whatever_comes_each_request_ends_once_and_shows_nothing_twice(
    steps: list[tuple[str, int, int, Any]],
    deploy: str,
    modalities: list[str] | None,
    last: ev.Event,
    style: str,
) -> None:
    """In any order of events: one Finish and it is the last action; no stage is dispatched more than the
    attempts allow for it and its ancestors; what is shown of a stage has no gap and no repetition, over all attempts.
    """
    walk = Walk(deploy, modalities)
    walk.tell(ev.Submitted())
    for step in steps:
        walk.tell(event_of(walk, step, style))
    walk.tell(last)
    assert [type(action) for action in walk.actions].count(ev.Finish) == 1
    assert isinstance(walk.actions[-1], ev.Finish)
    for stage_id, run in walk.machine.runs.items():
        dispatches = [action for action in of(walk.actions, ev.Dispatch) if action.stage_id == stage_id]
        assert [action.attempt for action in dispatches] == list(range(len(dispatches)))
        assert run.attempt < 3 * len(walk.machine.runs)
        emitted = [action.output for action in of(walk.actions, ev.Emit) if action.output.stage_id == stage_id]
        pieces = [output.text or output.data.decode() for output in emitted if output.finish_reason is None]
        assert pieces == [str(number) for number in range(len(pieces))]
        assert [output.finish_reason for output in emitted].count("stop") <= 1


# ---- what the client reads


_CAUSES = st.sampled_from(["lost", "slow", "unsent", "overloaded", "engine", "engine death", "payload", "silent end"])


@given(st.lists(_CAUSES, min_size=1, max_size=6), st.booleans())
def test_whatever_befell_a_request_its_error_names_stage_replica_and_cause_once(causes: list[str], ends: bool) -> None:
    """Each attempt at another replica, for another cause; in the end nobody may be left."""
    walk = Walk(attempts=4)
    walk.tell(ev.Submitted())
    finished: ev.Finish | None = None
    for number, cause in enumerate(causes):
        reason = f"cause {number}"
        if cause == "engine death":
            reason = f"{ENGINE_DIED}: {reason}"
        if cause != "unsent":
            walk.accepted(0, replica_id=number)
        match cause:
            case "lost" | "slow" | "unsent" | "silent end":
                lost = ev.ReplicaLost(0, number, reason, cause != "unsent", f"tcp://0-{number}:1", cause == "slow")
                actions = walk.tell(lost)
            case "overloaded":
                actions = walk.tell(rejected(0, number, FailureKind.OVERLOADED, reason))
            case _:
                kind = FailureKind.PAYLOAD if cause == "payload" else FailureKind.ENGINE
                actions = walk.tell(failed(0, number, kind, reason))
        finishes = of(actions, ev.Finish)
        if finishes:
            finished = finishes[0]
            break
    if finished is None and ends:
        finished = finish_of(walk.tell(ev.StageUnavailable(0, len(causes), "nobody is left")))
    if finished is not None:
        text = str(finished.error)
        where = "replica not picked" if cause == "unsent" else f"replica 0/{number}"
        assert text.count(f"stage 0 {where}: ") == 1
        assert text.count(f"cause {number}") == text.count("cause ") == 1
