"""A request's companions: started with it, collected before the stage that needs them, gone with it."""

from __future__ import annotations

from typing import Any

import pytest

from hub.request import events as ev
from hub.request.companions import MAX_COMPANIONS, Companions, check_companions, companion_plan
from hub.request.plan import StageGraph
from omni_discovery.deploy.document import parse_deploy
from omni_discovery.errors import EngineFailedError, InvalidRequestError, ReplicaLostError
from omni_discovery.wire import FailureKind
from tests.support.request_walk import PAIR, Walk, done, finish_of, of

NEGATIVE: dict[str, dict[str, Any]] = {"negative": {"prompt": "blurry"}}
CHAIN = """
stages: [{stage_id: 0, engine: e}, {stage_id: 1, engine: e}, {stage_id: 2, engine: e, final_output: text}]
"""
TWO = NEGATIVE | {"style": {"prompt": "ink"}}


def collected(walk: Walk, role: str, *to: int) -> list[ev.Action]:
    return walk.tell(ev.CompanionDone(role, done(0, 0, to).payloads))


def test_companions_start_when_their_parent_has_found_a_replica_and_only_once() -> None:
    walk = Walk(companions=NEGATIVE)
    assert not of(walk.tell(ev.Submitted()), ev.StartCompanions)
    assert walk.sent(0) == [ev.StartCompanions(NEGATIVE)]
    walk.lost(0)
    assert walk.sent(0, replica_id=1) == []


@pytest.mark.parametrize("parent_first", [True, False])
def test_the_next_stage_waits_for_all_of_them_and_gets_their_hand_offs_by_role(parent_first: bool) -> None:
    walk = Walk(companions=TWO)
    walk.tell(ev.Submitted())
    walk.accepted(0)
    assert collected(walk, "style", 1) == []
    if parent_first:
        assert not of(walk.done(0, 0, to=[1]), ev.Dispatch)
        (dispatch,) = collected(walk, "negative", 1)
    else:
        assert collected(walk, "negative", 1) == []
        (dispatch,) = of(walk.done(0, 0, to=[1]), ev.Dispatch)
    assert isinstance(dispatch, ev.Dispatch)
    assert dispatch.stage_id == 1
    assert [ref.role for ref in dispatch.payloads] == ["", "negative", "style"]
    # Another attempt gets the same.
    again = of(walk.lost(1), ev.Dispatch)[0]
    assert again.payloads == dispatch.payloads


def test_one_that_fails_fails_its_parent_once_and_the_others_with_it() -> None:
    walk = Walk(companions=TWO)
    walk.tell(ev.Submitted())
    walk.accepted(0)
    actions = walk.tell(ev.CompanionFailed("negative", ReplicaLostError("it died")))
    assert of(actions, ev.Abort)
    assert of(actions, ev.StopCompanions)
    error = finish_of(actions).error
    assert isinstance(error, ReplicaLostError)
    assert str(error) == "companion 'negative': it died"
    assert walk.tell(ev.CompanionFailed("style", ReplicaLostError("too late"))) == []


def test_one_that_hands_nothing_over_is_an_error_and_never_a_wait() -> None:
    walk = Walk(companions=NEGATIVE)
    walk.tell(ev.Submitted())
    walk.accepted(0)
    error = finish_of(collected(walk, "negative")).error
    assert isinstance(error, EngineFailedError)
    assert "handed nothing over for stage 1" in str(error)


def test_a_parent_that_asks_for_nothing_more_ends_without_them() -> None:
    walk = Walk(companions=NEGATIVE)
    walk.tell(ev.Submitted())
    walk.accepted(0)
    actions = walk.done(0, 0)
    assert of(actions, ev.StopCompanions)
    assert finish_of(actions).outcome is ev.Outcome.OK


def test_a_lost_hand_off_begins_all_of_them_anew() -> None:
    walk = Walk(modalities=["image"], companions=NEGATIVE)
    walk.tell(ev.Submitted())
    walk.accepted(0)
    collected(walk, "negative", 1)
    walk.done(0, 0, to=[1])
    walk.accepted(1)
    assert of(walk.failed(1, FailureKind.PAYLOAD), ev.StopCompanions)
    assert walk.sent(0) == [ev.StartCompanions(NEGATIVE)]
    assert not of(walk.done(0, 0, to=[1]), ev.Dispatch)
    assert of(collected(walk, "negative", 1), ev.Dispatch)


def test_the_end_frees_them() -> None:
    walk = Walk(companions=NEGATIVE)
    walk.tell(ev.Submitted())
    walk.accepted(0)
    assert of(walk.tell(ev.Cancelled()), ev.StopCompanions)


def test_what_no_pipeline_can_serve_is_refused_at_the_door() -> None:
    plan = StageGraph(parse_deploy(PAIR, "test.yaml")).plan(None)
    check_companions(plan, {})
    check_companions(plan, TWO)
    for bad, told in (
        ({"a b": {"prompt": "x"}}, "a companion's role"),
        ({"x" * 33: {"prompt": "x"}}, "a companion's role"),
        ({"": {"prompt": "x"}}, "a companion's role"),
        ({"negative": {}}, "is empty"),
        ({f"r{number}": {"prompt": "x"} for number in range(MAX_COMPANIONS + 1)}, "may have 8"),
    ):
        with pytest.raises(InvalidRequestError, match=told):
            check_companions(plan, bad)
    text = StageGraph(parse_deploy(PAIR, "test.yaml")).plan(["text"])
    with pytest.raises(InvalidRequestError, match="nothing comes after stage 0"):
        check_companions(text, NEGATIVE)
    assert companion_plan(plan).next_stages == {0: (1,)}


def test_only_the_stages_that_take_the_first_ones_hand_off_wait_for_companions() -> None:
    plan = StageGraph(parse_deploy(CHAIN, "test.yaml")).plan(None)
    companions = Companions(plan, TWO)
    assert [companions.ready_for(stage_id) for stage_id in (0, 1, 2)] == [True, False, True]
    assert companions.collect("negative", done(0, 0, [1]).payloads) == ""
    assert not companions.complete
    assert companions.collect("style", done(0, 0, [1]).payloads) == ""
    assert companions.ready_for(1)
    assert [ref.role for ref in companions.refs_for(1)] == ["negative", "style"]
    assert companions.refs_for(2) == ()
    companions.reset()
    assert (companions.ready_for(1), companions.started, companions.refs_for(1)) == (False, False, ())


def test_roles_and_companions_may_be_as_long_and_many_as_they_may_be() -> None:
    plan = StageGraph(parse_deploy(PAIR, "test.yaml")).plan(None)
    check_companions(plan, {"x" * 32: {"prompt": "x"}})
    check_companions(plan, {f"r{number}": {"prompt": "x"} for number in range(MAX_COMPANIONS)})
