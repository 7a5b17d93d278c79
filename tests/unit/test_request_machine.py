"""RequestMachine: one request through the stage graph, event by event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hub import request_events as ev
from hub.pipeline import StageGraph
from hub.request import RequestMachine
from hub.request_state import OrchestratorRequestState, StreamingInputState
from omni_discovery import wire
from omni_discovery.deploy import parse_deploy
from omni_discovery.errors import (
    DeadlineExceededError,
    EngineFailedError,
    InvalidRequestError,
    OverloadedError,
    ReplicaLostError,
    StageUnavailableError,
)
from omni_discovery.wire import FailureKind

PAIR = "stages: [{stage_id: 0, engine: e, final_output: text}, {stage_id: 1, engine: e, final_output: image}]"
BRANCHING = """
stages:
  - {stage_id: 0, engine: e, final_output: text}
  - {stage_id: 1, engine: e, input_from: [0], final_output: image}
  - {stage_id: 2, engine: e, input_from: [0]}
  - {stage_id: 3, engine: e, input_from: [1, 2], final_output: audio}
"""


class Walk:
    """A machine with a clock, and short ways to tell it things."""

    def __init__(self, deploy: str = PAIR, modalities: Sequence[str] | None = None, attempts: int = 3) -> None:
        graph = StageGraph(parse_deploy(deploy, "test.yaml"))
        plan = graph.plan(modalities)
        params = graph.merge_params({0: {"seed": 1}})
        self.machine = RequestMachine("r1", {"prompt": "hi"}, plan, params, attempts)
        self.now_s = 0.0
        self.actions: list[ev.Action] = []

    def tell(self, event: ev.Event) -> list[ev.Action]:
        self.now_s += 1.0
        actions = self.machine.handle(event, self.now_s)
        self.actions += actions
        return actions

    def attempt(self, stage_id: int) -> int:
        return self.machine.runs[stage_id].attempt

    def sent(self, stage_id: int, replica_id: int = 0) -> list[ev.Action]:
        replica = ev.ReplicaRef(stage_id, replica_id, 7, f"tcp://{stage_id}-{replica_id}:1")
        return self.tell(ev.Sent(stage_id, self.attempt(stage_id), replica))

    def accepted(self, stage_id: int, replica_id: int = 0) -> list[ev.Action]:
        self.sent(stage_id, replica_id)
        return self.tell(ev.Accepted(stage_id, self.attempt(stage_id)))

    def chunk(self, stage_id: int, seq: int, text: str = "x", attempt: int | None = None) -> list[ev.Action]:
        number = self.attempt(stage_id) if attempt is None else attempt
        return self.tell(ev.Chunk(stage_id, number, chunk(seq, text)))

    def done(self, stage_id: int, seq: int, to: Sequence[int] = (), reason: str = "stop") -> list[ev.Action]:
        return self.tell(ev.StageDone(stage_id, self.attempt(stage_id), done(stage_id, seq, to, reason)))

    def lost(self, stage_id: int, **more: Any) -> list[ev.Action]:
        return self.tell(ev.ReplicaLost(stage_id, self.attempt(stage_id), "it died", **more))

    def failed(self, stage_id: int, kind: FailureKind) -> list[ev.Action]:
        return self.tell(ev.StageFailed(stage_id, self.attempt(stage_id), kind, "it broke"))

    def rejected(self, stage_id: int, kind: FailureKind) -> list[ev.Action]:
        return self.tell(ev.Rejected(stage_id, self.attempt(stage_id), kind, "no"))


def chunk(seq: int, text: str = "x") -> wire.Chunk:
    return wire.Chunk(epoch=7, request_id="r1", seq=seq, modality="text", queue_length=0, text=text)


def done(stage_id: int, seq: int, to: Sequence[int] = (), reason: str = "stop") -> wire.StageDone:
    payloads = tuple(
        wire.PayloadRef(from_stage=stage_id, to_stage=each, key=f"{stage_id}-{each}", connector="shm", size_bytes=1)
        for each in to
    )
    return wire.StageDone(
        epoch=7, request_id="r1", seq=seq, finish_reason=reason, queue_length=0, payloads=payloads, usage={"n": seq}
    )


def of(actions: Sequence[ev.Action], *kinds: type[Any]) -> list[Any]:
    return [action for action in actions if isinstance(action, kinds)]


def finish_of(actions: Sequence[ev.Action]) -> ev.Finish:
    assert isinstance(actions[-1], ev.Finish)
    return actions[-1]


# ---- forward


def test_the_first_stage_gets_the_clients_input_and_its_parameters() -> None:
    (dispatch,) = Walk().tell(ev.Submitted())
    assert dispatch == ev.Dispatch(0, 0, {"prompt": "hi"}, {"seed": 1}, (), (1,), frozenset())


def test_text_then_picture_then_the_end() -> None:
    """1. stage 0 streams two pieces and hands over to stage 1
    2. stage 1 gets that hand-off, shows a picture and is done
    3. the request ends well, with one end for each final stage and a summary before the finish
    """
    walk = Walk()
    walk.tell(ev.Submitted())
    walk.accepted(0)
    assert [action.output.text for action in of(walk.chunk(0, 0, "a") + walk.chunk(0, 1, "b"), ev.Emit)] == ["a", "b"]
    end, dispatch = walk.done(0, 2, to=[1])
    assert end.output.finish_reason == "stop"
    assert [ref.key for ref in dispatch.payloads] == ["0-1"]
    walk.accepted(1)
    walk.chunk(1, 0)
    actions = walk.done(1, 1)
    assert [action.output.modality for action in of(actions, ev.Emit)] == ["image", "summary"]
    assert finish_of(actions) == ev.Finish(ev.Outcome.OK, None)


def test_a_stage_that_is_not_asked_for_shows_nothing() -> None:
    walk = Walk(modalities=["image"])
    walk.tell(ev.Submitted())
    walk.accepted(0)
    assert walk.chunk(0, 0) == []
    assert of(walk.done(0, 1, to=[1]), ev.Emit) == []


def test_a_stage_that_hands_nothing_over_ends_its_branch_quietly() -> None:
    """1. stage 0 hands over to 1 but not to 2
    2. 3 needs both 1 and 2: it is skipped; 1 still runs
    3. the request ends well when 1 is done
    """
    walk = Walk(BRANCHING)
    walk.tell(ev.Submitted())
    walk.accepted(0)
    assert [action.stage_id for action in of(walk.done(0, 0, to=[1]), ev.Dispatch)] == [1]
    walk.accepted(1)
    actions = walk.done(1, 0, to=[3])
    assert finish_of(actions).outcome is ev.Outcome.OK
    # What 1 left for 3 will never be fetched; 0 is told as well, as not everyone it might serve has run.
    assert [action.stage_id for action in of(actions, ev.ReleasePayload)] == [0, 1]


def test_a_stage_of_two_inputs_waits_for_both() -> None:
    walk = Walk(BRANCHING)
    walk.tell(ev.Submitted())
    walk.accepted(0)
    assert [action.stage_id for action in of(walk.done(0, 0, to=[1, 2]), ev.Dispatch)] == [1, 2]
    walk.accepted(1)
    walk.accepted(2)
    assert of(walk.done(2, 0, to=[3]), ev.Dispatch) == []
    (dispatch,) = of(walk.done(1, 0, to=[3]), ev.Dispatch)
    assert [ref.from_stage for ref in dispatch.payloads] == [1, 2]


def test_a_refusal_of_the_first_stage_ends_the_request_at_once() -> None:
    walk = Walk()
    walk.tell(ev.Submitted())
    walk.accepted(0)
    assert finish_of(walk.done(0, 0)).outcome is ev.Outcome.OK


def test_output_may_overtake_the_acceptance() -> None:
    """They travel on two sockets."""
    walk = Walk()
    walk.tell(ev.Submitted())
    walk.sent(0)
    assert of(walk.chunk(0, 0), ev.Emit)
    assert walk.tell(ev.Accepted(0, 0)) == []


def test_the_timings_of_each_stage_and_of_the_whole_are_kept() -> None:
    walk = Walk(modalities=["text"])
    walk.tell(ev.Submitted())
    walk.accepted(0)
    walk.chunk(0, 0)
    actions = walk.done(0, 1)
    assert of(actions, ev.Emit)[-1].output.timings_s == {
        "stage0.pick": 1.0,
        "stage0.accept": 1.0,
        "stage0.first_output": 2.0,
        "stage0.total": 3.0,
        "total": 4.0,
    }


def test_the_state_has_the_names_that_users_know() -> None:
    state = Walk().machine.state
    assert isinstance(state, OrchestratorRequestState)
    assert (state.request_id, state.prompt, state.final_stage_id) == ("r1", {"prompt": "hi"}, 1)
    assert state.final_output_stage_ids == {0, 1}
    assert state.sampling_params_list == [{"seed": 1}, {}]
    assert state.streaming == StreamingInputState(False, False, None, {})
    assert OrchestratorRequestState("x").pd_prefill_multimodal_output is None


# ---- sequence


def test_a_piece_that_comes_twice_is_dropped() -> None:
    walk = Walk()
    walk.tell(ev.Submitted())
    walk.accepted(0)
    walk.chunk(0, 0)
    assert walk.chunk(0, 0) == [ev.Drop("duplicate")]


def test_a_missing_piece_after_shown_output_ends_the_request() -> None:
    walk = Walk()
    walk.tell(ev.Submitted())
    walk.accepted(0)
    walk.chunk(0, 0)
    actions = walk.chunk(0, 2)
    assert actions[0] == ev.Drop("gap")
    assert of(actions, ev.Abort)
    assert isinstance(finish_of(actions).error, ReplicaLostError)


def test_a_missing_piece_before_anything_was_shown_moves_the_request() -> None:
    walk = Walk()
    walk.tell(ev.Submitted())
    walk.accepted(0)
    actions = walk.done(0, 3, to=[1])
    assert of(actions, ev.Dispatch)[0].avoid == {"tcp://0-0:1"}
    assert of(actions, ev.Dispatch)[0].attempt == 1


def test_frames_of_an_earlier_attempt_change_nothing() -> None:
    walk = Walk()
    walk.tell(ev.Submitted())
    walk.accepted(0)
    walk.lost(0)
    walk.accepted(0, replica_id=1)
    assert walk.chunk(0, 0, attempt=0) == [ev.Drop("stale")]
    assert walk.tell(ev.ReplicaLost(0, 0, "again")) == []
    assert walk.tell(ev.Chunk(9, 0, chunk(0))) == [ev.Drop("stale")]


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


def test_a_replica_that_dies_after_output_was_shown_ends_the_request() -> None:
    walk = Walk()
    walk.tell(ev.Submitted())
    walk.accepted(0)
    walk.chunk(0, 0)
    error = finish_of(walk.lost(0)).error
    assert isinstance(error, ReplicaLostError)
    assert "stage 0 replica 0/0: it died" in str(error)


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


def at_picture(modalities: Sequence[str] | None = None) -> Walk:
    """Stage 0 is done, stage 1 has accepted."""
    walk = Walk(modalities=modalities)
    walk.tell(ev.Submitted())
    walk.accepted(0)
    walk.chunk(0, 0)
    walk.done(0, 1, to=[1])
    walk.accepted(1)
    return walk


def test_a_painter_that_dies_before_it_accepts_is_replaced_with_the_same_handoff() -> None:
    walk = Walk(modalities=["image"])
    walk.tell(ev.Submitted())
    walk.accepted(0)
    walk.done(0, 0, to=[1])
    walk.sent(1)
    (dispatch,) = of(walk.lost(1), ev.Dispatch)
    assert (dispatch.stage_id, dispatch.attempt, len(dispatch.payloads)) == (1, 1, 1)


def test_a_painter_that_dies_at_work_has_the_unseen_thinker_think_again() -> None:
    """1. only the picture is wanted; the painter dies after it took the hand-off
    2. nothing was shown, so the thinker begins anew, under a new attempt
    3. the second hand-off goes to a painter and the request ends well
    """
    walk = at_picture(["image"])
    actions = walk.lost(1)
    (dispatch,) = of(actions, ev.Dispatch)
    assert (dispatch.stage_id, dispatch.attempt) == (0, 1)
    assert [action.stage_id for action in of(actions, ev.ReleasePayload)] == [0]
    walk.accepted(0)
    assert [action.stage_id for action in of(walk.done(0, 0, to=[1]), ev.Dispatch)] == [1]
    walk.accepted(1, replica_id=1)
    assert finish_of(walk.done(1, 0)).outcome is ev.Outcome.OK


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


# ---- the end


def test_a_cancel_aborts_what_runs_and_releases_what_waits() -> None:
    """1. stage 0 is done and its hand-off is on the way to stage 1, which runs
    2. the client leaves: stage 1 is aborted, stage 0's hand-off released
    """
    walk = at_picture()
    actions = walk.tell(ev.Cancelled())
    assert [(type(action).__name__) for action in actions] == ["ReleasePayload", "Abort", "Emit", "Finish"]
    assert finish_of(actions) == ev.Finish(ev.Outcome.CANCELLED, None)
    assert of(actions, ev.Emit)[0].output.finish_reason == "abort"


def test_a_cancel_for_a_reason_of_the_hub_is_a_failure_with_that_reason() -> None:
    walk = at_picture()
    assert finish_of(walk.tell(ev.Cancelled(OverloadedError("slow")))).outcome is ev.Outcome.FAILED


def test_a_passed_deadline_names_the_stages_that_were_not_finished() -> None:
    walk = at_picture()
    error = finish_of(walk.tell(ev.DeadlinePassed())).error
    assert isinstance(error, DeadlineExceededError)
    assert "not finished: stage 1" in str(error)


def test_a_pick_that_still_waits_is_aborted_too() -> None:
    walk = Walk()
    walk.tell(ev.Submitted())
    assert ev.Abort(0, 0, None) in walk.tell(ev.Cancelled())


def test_after_the_end_nothing_happens() -> None:
    walk = at_picture()
    walk.tell(ev.Cancelled())
    assert walk.tell(ev.Cancelled()) == walk.tell(ev.Submitted()) == walk.chunk(1, 0) == walk.done(1, 0) == []


def test_submitting_twice_changes_nothing() -> None:
    walk = Walk()
    walk.tell(ev.Submitted())
    assert walk.tell(ev.Submitted()) == []


# ---- any order at all

_stages = st.integers(0, 4)
_attempts = st.sampled_from([0, 0, -1])
_kinds = st.sampled_from(FailureKind)
_texts = st.just("x")


@st.composite
def events(draw: st.DrawFn) -> tuple[str, int, int, Any]:
    """A step: what happens, at which stage, how far from the current attempt, and a detail."""
    name = draw(st.sampled_from(["sent", "accepted", "chunk", "done", "rejected", "failed", "lost", "nobody"]))
    detail = draw({"rejected": _kinds, "failed": _kinds}.get(name, st.sampled_from([0, 0, 0, 1, -1])))
    return name, draw(_stages), draw(_attempts), detail


def event_of(walk: Walk, step: tuple[str, int, int, Any]) -> ev.Event:
    name, stage_id, back, detail = step
    run = walk.machine.runs.get(stage_id)
    attempt = (run.attempt if run else 0) + back
    seq = max(0, (run.next_seq if run else 0) + (detail if isinstance(detail, int) else 0))
    match name:
        case "sent":
            return ev.Sent(stage_id, attempt, ev.ReplicaRef(stage_id, attempt, 7, f"tcp://{stage_id}-{attempt}:1"))
        case "accepted":
            return ev.Accepted(stage_id, attempt)
        case "chunk":
            return ev.Chunk(stage_id, attempt, chunk(seq, f"{attempt}.{seq}"))
        case "done":
            targets = [1, 2, 3] if detail >= 0 else [1]
            return ev.StageDone(stage_id, attempt, done(stage_id, seq, targets))
        case "rejected":
            return ev.Rejected(stage_id, attempt, detail, "no")
        case "failed":
            return ev.StageFailed(stage_id, attempt, detail, "broke")
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
)
def test_whatever_comes_each_request_ends_once_and_shows_nothing_twice(
    steps: list[tuple[str, int, int, Any]], deploy: str, modalities: list[str] | None, last: ev.Event
) -> None:
    """In any order of events: one Finish and it is the last action; no stage is dispatched more than the
    attempts allow for it and its ancestors; the text of a stage comes from one attempt, gapless.
    """
    walk = Walk(deploy, modalities)
    walk.tell(ev.Submitted())
    for step in steps:
        walk.tell(event_of(walk, step))
    walk.tell(last)
    assert [type(action) for action in walk.actions].count(ev.Finish) == 1
    assert isinstance(walk.actions[-1], ev.Finish)
    for stage_id, run in walk.machine.runs.items():
        dispatches = [action for action in of(walk.actions, ev.Dispatch) if action.stage_id == stage_id]
        assert [action.attempt for action in dispatches] == list(range(len(dispatches)))
        assert run.attempt < 3 * len(walk.machine.runs)
        emitted = [action.output for action in of(walk.actions, ev.Emit) if action.output.stage_id == stage_id]
        texts = [output.text for output in emitted if output.finish_reason is None]
        assert len({text.split(".")[0] for text in texts}) <= 1
        assert [int(text.split(".")[1]) for text in texts] == list(range(len(texts)))
        assert [output.finish_reason for output in emitted].count("stop") <= 1
