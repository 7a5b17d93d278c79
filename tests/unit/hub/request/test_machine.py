"""RequestMachine: one request through the stage graph, event by event."""

from __future__ import annotations

from hub.request import events as ev
from hub.request.state import OrchestratorRequestState, StreamingInputState
from omni_discovery.errors import (
    DeadlineExceededError,
    OverloadedError,
    ReplicaLostError,
)
from tests.support.request_walk import BRANCHING, Walk, accepted, at_picture, chunk, finish_of, heard, of

# ---- forward


def test_the_first_stage_gets_the_clients_input_and_its_parameters() -> None:
    (dispatch,) = Walk().tell(ev.Submitted())
    assert dispatch == ev.Dispatch(0, 0, {"prompt": "hi"}, {"seed": 1}, (), (1,), frozenset(), seed=dispatch.seed)


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


def test_a_hand_off_that_was_fetched_is_released_when_the_request_ends_well() -> None:
    """The replica keeps it over the fetch, so that the next stage could run again; nobody else ever drops it."""
    actions = at_picture().done(1, 0)
    assert finish_of(actions).outcome is ev.Outcome.OK
    assert [action.stage_id for action in of(actions, ev.ReleasePayload)] == [0]


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
    # What 1 left for 3 will never be fetched; what 0 left was, and is kept all the same until it is released.
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
    assert walk.tell(accepted(0, 0)) == []


def test_the_timings_of_each_stage_and_of_the_whole_are_kept() -> None:
    walk = Walk(modalities=["text"])
    walk.tell(ev.Submitted())
    walk.accepted(0)
    walk.chunk(0, 0)
    actions = walk.done(0, 1)
    assert of(actions, ev.Emit)[-1].output.timings_s == {
        "stage0.queue": 1.0,
        "stage0.submit": 1.0,
        "stage0.first_output": 2.0,
        "stage0.total": 3.0,
        "total": 4.0,
    }


def test_the_state_has_the_names_that_users_know() -> None:
    state = Walk().machine.state.public
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
    error = finish_of(actions).error
    assert isinstance(error, ReplicaLostError)
    assert [name.partition("/")[0] for name in error.replicas] == ["0"], "the access log names what was tried"


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
    assert walk.tell(heard(9, 0, chunk(0))) == [ev.Drop("stale")]


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
