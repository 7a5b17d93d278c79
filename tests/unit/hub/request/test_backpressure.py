"""A client that is behind with what is made for it: who is told to stop making more."""

from __future__ import annotations

from typing import Any

import pytest

from hub.request import events as ev
from hub.request.events import ClientBackpressure
from omni_discovery.wire import FailureKind
from tests.support.request_walk import Walk, at_picture, finish_of, of

BEHIND, CAUGHT_UP = ClientBackpressure(is_behind=True), ClientBackpressure(is_behind=False)
HIDDEN_FIRST = "stages: [{stage_id: 0, engine: e}, {stage_id: 1, engine: e, final_output: text}]"


def told(actions: Any) -> list[tuple[int, int, bool]]:
    """Stage, number of the replica, and whether it is to pause."""
    return [(action.stage_id, action.replica.replica_id, action.paused) for action in of(actions, ev.Pause)]


def running(deploy: str = "stages: [{stage_id: 0, engine: e, final_output: text}]") -> Walk:
    """Stage 0 has said a word that another replica could go on behind."""
    walk = Walk(deploy, params={})
    walk.tell(ev.Submitted())
    walk.accepted(0)
    walk.words(0, "ab")
    return walk


# ---- who is told


def test_the_replica_that_makes_the_output_is_told_once_for_each_crossing() -> None:
    walk = running()
    assert told(walk.tell(BEHIND)) == [(0, 0, True)]
    assert told(walk.tell(BEHIND)) == []
    assert told(walk.tell(CAUGHT_UP)) == [(0, 0, False)]
    assert told(walk.tell(CAUGHT_UP)) == []


def test_a_stage_whose_output_the_client_does_not_get_is_not_told() -> None:
    """It works for the one that is told, and as soon as that one begins, it is."""
    walk = Walk(HIDDEN_FIRST, params={})
    walk.tell(ev.Submitted())
    walk.accepted(0)
    assert told(walk.tell(BEHIND)) == []
    walk.done(0, 0, to=[1])
    assert told(walk.sent(1)) == [(1, 0, True)]


@pytest.mark.attack("I2")
def test_the_stages_that_feed_by_pieces_what_the_client_gets_are_told_with_it() -> None:
    """They wait for it, and would keep their slots. A stage that hands over whole to one of them works on."""
    deploy = (
        "stages: [{stage_id: 0, engine: e}, {stage_id: 1, engine: e}, {stage_id: 2, engine: e},"
        " {stage_id: 3, engine: e, final_output: text}]\n"
        "edges: [{from: 1, to: 2, async_chunk: true}, {from: 2, to: 3, async_chunk: true}]"
    )
    walk = Walk(deploy, params={})
    walk.tell(ev.Submitted())
    walk.accepted(0)
    assert told(walk.tell(BEHIND)) == []
    walk.done(0, 0, to=[1])
    assert told(walk.sent(1)) == [(1, 0, True)]
    assert told(walk.tell(CAUGHT_UP)) == [(1, 0, False)]
    assert walk.machine.state.plan.keeps_pace(3)


def test_a_stage_that_is_done_is_not_told_and_one_that_runs_beside_it_is() -> None:
    walk = at_picture()
    assert told(walk.tell(BEHIND)) == [(1, 0, True)]
    assert told(walk.tell(CAUGHT_UP)) == [(1, 0, False)]


def test_what_is_said_too_early_is_said_when_there_is_somebody_to_hear_it() -> None:
    """The client is behind while the stage is still being picked."""
    walk = Walk(params={})
    walk.tell(ev.Submitted())
    assert walk.tell(BEHIND) == []
    assert told(walk.sent(0)) == [(0, 0, True)]


@pytest.mark.parametrize("failure", ["lost", "engine"])
def test_another_replica_that_goes_on_is_told_too(failure: str) -> None:
    """1. the client is behind, and the replica is lost, or fails
    2. the next one goes on behind what was shown, and is told to pause at once; 3. and to go on when the client reads
    """
    walk = running()
    walk.tell(BEHIND)
    actions = walk.lost(0) if failure == "lost" else walk.failed(0, FailureKind.OVERLOADED)
    (dispatch,) = of(actions, ev.Dispatch)
    assert dispatch.resume.token_ids == (2,)
    assert told(actions) == []
    assert told(walk.sent(0, replica_id=1)) == [(0, 1, True)]
    assert told(walk.tell(CAUGHT_UP)) == [(0, 1, False)]


def test_another_replica_is_told_nothing_where_the_client_has_caught_up_meanwhile() -> None:
    walk = running()
    walk.tell(BEHIND)
    walk.lost(0)
    assert walk.tell(CAUGHT_UP) == []
    assert told(walk.sent(0, replica_id=1)) == []


def test_after_a_lost_session_the_last_word_is_said_again() -> None:
    """Either may have been lost with it; a replica that was never told anything has nothing to hear."""
    walk = running()
    back = ev.SessionBack(0, 0)
    assert not walk.machine.must_repeat(0)
    assert told(walk.tell(back)) == []
    walk.tell(BEHIND)
    assert walk.machine.must_repeat(0)
    assert told(walk.tell(back)) == told(walk.tell(back)) == [(0, 0, True)]
    walk.tell(CAUGHT_UP)
    assert walk.machine.must_repeat(0)
    assert told(walk.tell(back)) == [(0, 0, False)]


@pytest.mark.parametrize("event", [ev.Cancelled(), ev.DeadlinePassed()])
def test_a_request_that_waits_for_its_client_is_stopped_like_any_other(event: ev.Event) -> None:
    walk = running()
    walk.tell(BEHIND)
    actions = walk.tell(event)
    assert [(abort.stage_id, abort.attempt) for abort in of(actions, ev.Abort)] == [(0, 0)]
    assert finish_of(actions)
    assert walk.tell(CAUGHT_UP) == []


def test_what_comes_after_the_pause_is_shown_as_ever() -> None:
    """It was on its way, or the engine can't be paused."""
    walk = running()
    walk.tell(BEHIND)
    assert [emit.output.text for emit in of(walk.words(0, "cd"), ev.Emit)] == ["cd"]
    assert finish_of(walk.done(0, 2)).outcome is ev.Outcome.OK
