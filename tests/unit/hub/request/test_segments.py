"""Segments in the machine: which stage gets what when, and what becomes of losses. Events in, actions out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hub.json_memory import memory_of_value
from hub.request import events as ev
from hub.request.machine import RequestMachine
from hub.request.outputs import OmniOutput
from hub.request.plan import StageGraph
from hub.request.retry import Loss, Shown, Verdict
from hub.request.segments import Segments
from hub.request.state import Phase, RequestState
from omni_discovery import wire
from omni_discovery.deploy.document import parse_deploy
from omni_discovery.errors import InvalidRequestError, ReplicaLostError
from omni_discovery.wire import FailureKind
from tests.support.request_walk import BRANCHING, PAIR, Walk, finish_of, heard, of

SILENT = "stages: [{stage_id: 0, engine: e}, {stage_id: 1, engine: e, final_output: text}]"


class Talk(Walk):
    """A request whose first segment is ``s0``."""

    def __init__(self, deploy: str = PAIR, attempts: int = 3) -> None:
        super().__init__(deploy)
        graph = StageGraph(parse_deploy(deploy, "test.yaml"))
        state = RequestState("r1", {"prompt": "s0"}, graph.plan(), graph.merge_params(None), attempts, segmented=True)
        self.machine = RequestMachine(state)
        self.tell(ev.Submitted())

    def segment(self, text: str | None) -> list[ev.Action]:
        return self.tell(ev.SegmentArrived(None if text is None else {"prompt": text}))

    def ended(self, stage_id: int, to: Sequence[int] = (), seq: int | None = None) -> list[ev.Action]:
        run = self.machine.runs[stage_id]
        payloads = tuple(
            wire.PayloadRef(from_stage=stage_id, to_stage=each, key=f"{stage_id}-{each}", connector="c", size_bytes=1)
            for each in to
        )
        message = wire.SegmentDone(
            epoch=7,
            request_id="r1",
            attempt=run.attempt,
            seq=run.next_seq if seq is None else seq,
            segment=0,
            finish_reason="stop",
            queue_length=0,
            payloads=payloads,
            usage={"prompt_tokens": 3},
        )
        return self.tell(heard(stage_id, run.attempt, message))


def updates(actions: Sequence[ev.Action]) -> list[tuple[int, int, str | None]]:
    """Stage, number and prompt of each; None where no more come."""
    found: list[ev.Update] = of(actions, ev.Update)
    return [(each.stage_id, each.segment, None if each.is_last else each.inputs["prompt"]) for each in found]


def emitted(actions: Sequence[ev.Action]) -> list[OmniOutput]:
    return [action.output for action in of(actions, ev.Emit)]


def test_a_segment_goes_to_a_stage_when_it_has_ended_the_one_before() -> None:
    """1. the first segment is dispatched; the second waits
    2. the first ends: the second follows it to the same replica, and the next stage gets the first one's hand-off
    3. the next stage ends its first: it gets the second, which has ended meanwhile
    """
    talk = Talk()
    (first,) = of(talk.actions, ev.Dispatch)
    assert (first.stage_id, first.inputs, first.segmented) == (0, {"prompt": "s0"}, True)
    talk.accepted(0, replica_id=4)
    assert talk.segment("s1") == []
    actions = talk.ended(0, to=[1])
    assert updates(actions) == [(0, 1, "s1")]
    assert of(actions, ev.Update)[0].replica.replica_id == 4
    assert [(d.stage_id, len(d.payloads), d.inputs) for d in of(actions, ev.Dispatch)] == [(1, 1, {"prompt": "s0"})]
    talk.accepted(1)
    assert updates(talk.ended(0, to=[1])) == []
    assert updates(talk.ended(1)) == [(1, 1, "s1")]


def test_each_segment_of_a_final_stage_ends_with_an_output_and_the_stage_with_its_usual_one() -> None:
    talk = Talk()
    talk.accepted(0)
    talk.words(0, "a", "b")
    (end,) = emitted(talk.ended(0))
    assert (end.segment, end.segment_end, end.finish_reason, end.usage) == (0, "stop", None, {"prompt_tokens": 3})
    talk.segment("s1")
    (piece,) = emitted(talk.words(0, "c"))
    assert (piece.segment, piece.text) == (1, "c")
    talk.ended(0)
    assert updates(talk.segment(None)) == [(0, 2, None)]
    actions = talk.done(0, talk.machine.runs[0].next_seq)
    stage_end, summary = emitted(actions)
    assert (stage_end.segment, stage_end.segment_end, stage_end.finish_reason) == (1, None, "stop")
    assert summary.is_summary
    assert finish_of(actions).error is None
    assert talk.machine.runs[1].phase is Phase.SKIPPED


def test_a_stage_without_hand_off_leaves_the_segment_out_and_ends_all_the_same() -> None:
    """The next stage gets the second and the fourth segment, as its first and second, and then the end."""
    talk = Talk()
    talk.accepted(0)
    for number, to in enumerate(([], [1], [], [1]), 1):
        actions = talk.ended(0, to=to)
        if number == 2:
            assert [d.inputs for d in of(actions, ev.Dispatch)] == [{"prompt": "s1"}]
            talk.accepted(1)
        talk.segment(f"s{number}" if number < 4 else None)
    assert updates(talk.ended(1)) == [(1, 1, "s3")]
    assert of(talk.done(0, talk.machine.runs[0].next_seq), ev.Finish, ev.Update) == []
    assert updates(talk.ended(1)) == [(1, 2, None)]
    assert finish_of(talk.done(1, talk.machine.runs[1].next_seq)).error is None


def test_a_stage_with_two_inputs_gets_a_segment_when_both_have_ended_it() -> None:
    talk = Talk(BRANCHING)
    talk.accepted(0)
    talk.ended(0, to=[1, 2])
    talk.accepted(1)
    talk.accepted(2)
    assert of(talk.ended(1, to=[3]), ev.Dispatch) == []
    (joined,) = of(talk.ended(2, to=[3]), ev.Dispatch)
    assert [ref.from_stage for ref in joined.payloads] == [1, 2]


def test_a_stage_runs_at_most_so_far_ahead_of_the_next() -> None:
    """The next stage works on the first, two more wait for it: the first stage gets no fourth until there is room."""
    talk = Talk()
    talk.accepted(0)
    for number in range(1, 6):
        talk.segment(f"s{number}")
    given = [update for _ in range(3) for update in updates(talk.ended(0, to=[1]))]
    assert given == [(0, 1, "s1"), (0, 2, "s2")]
    assert talk.machine.segments is not None
    assert talk.machine.segments.waits
    talk.accepted(1)
    actions = talk.ended(1)
    assert updates(actions) == [(1, 1, "s1"), (0, 3, "s3")]
    kept = {update.stage_id: update.kept_from for update in of(actions, ev.Update)}
    assert kept[0] == 1, "the first hand-off was taken"


def test_what_comes_behind_the_last_segment_is_dropped() -> None:
    talk = Talk()
    talk.accepted(0)
    talk.segment(None)
    assert talk.segment("late") == []
    assert updates(talk.ended(0)) == [(0, 1, None)]


@pytest.mark.parametrize("seq", [0, 2])
def test_a_segment_end_with_a_gap_or_a_second_time_is_not_taken(seq: int) -> None:
    """1. one chunk has come, so the end has number 1; 2. number 2 is a gap: the work is lost; number 0 came before"""
    talk = Talk()
    talk.accepted(0)
    talk.words(0, "a")
    actions = talk.ended(0, seq=seq)
    assert [drop.reason for drop in of(actions, ev.Drop)] == ["gap" if seq else "duplicate"]
    assert bool(of(actions, ev.Dispatch)) == bool(seq)


def test_a_segment_that_was_not_given_or_an_end_too_early_lets_the_work_be_lost() -> None:
    idle, early = Talk(), Talk()
    for talk in (idle, early):
        talk.accepted(0)
        talk.ended(0)
    assert isinstance(finish_of(idle.ended(0)).error, ReplicaLostError)
    assert isinstance(finish_of(early.done(0, 1)).error, ReplicaLostError)


def test_a_loss_during_the_first_segment_is_like_any_other() -> None:
    talk = Talk()
    talk.accepted(0)
    talk.words(0, "ab", "c")
    (again,) = of(talk.lost(0), ev.Dispatch)
    assert again.resume == wire.Resume(token_ids=(2, 1), text="abc")
    assert again.segmented


def test_a_loss_after_something_was_shown_is_one_typed_error() -> None:
    talk = Talk()
    talk.accepted(0)
    talk.words(0, "a")
    talk.ended(0)
    assert not talk.machine.can_move(0)
    error = finish_of(talk.lost(0)).error
    assert isinstance(error, ReplicaLostError)
    assert "part of the output was shown" in str(error)


def test_what_showed_nothing_begins_anew_with_all_segments() -> None:
    """1. the first stage shows nothing; it has ended two segments and works on the third when it is lost
    2. the whole request begins anew: the first segment is dispatched, the others follow one by one
    """
    talk = Talk(SILENT)
    talk.accepted(0)
    for number in (1, 2):
        talk.segment(f"s{number}")
        talk.ended(0, to=[1])
    actions = talk.lost(0)
    assert [(d.stage_id, d.inputs, d.attempt) for d in of(actions, ev.Dispatch)] == [(0, {"prompt": "s0"}, 1)]
    talk.accepted(0)
    assert updates(talk.ended(0, to=[1])) == [(0, 1, "s1")]
    assert updates(talk.ended(0, to=[1])) == [(0, 2, "s2")]


def test_segments_that_are_too_long_to_keep_are_not_begun_anew() -> None:
    talk = Talk(SILENT)
    talk.accepted(0)
    for _ in range(3):
        talk.segment("x" * (2 << 20))
    talk.ended(0, to=[1])
    error = finish_of(talk.lost(0)).error
    assert isinstance(error, ReplicaLostError)
    assert "too long" in str(error)


def test_a_refused_update_loses_the_work_and_one_the_engine_refuses_is_the_clients_mistake() -> None:
    refused, invalid = Talk(), Talk()
    for talk in (refused, invalid):
        talk.accepted(0)
        talk.words(0, "a")
        talk.ended(0)
        talk.segment("s1")
    assert isinstance(finish_of(refused.rejected(0, FailureKind.INVALID)).error, ReplicaLostError)
    assert isinstance(finish_of(invalid.failed(0, FailureKind.INVALID)).error, InvalidRequestError)


def test_what_was_said_last_is_said_again_when_the_session_is_back() -> None:
    """While a segment is worked on: the same again. Between two: its number alone, to see that the replica knows it."""
    talk = Talk()
    back: Any = lambda: talk.tell(ev.SessionBack(0, 0))  # noqa: E731
    talk.accepted(0)
    assert back() == []
    talk.ended(0)
    (nothing,) = of(back(), ev.Update)
    assert (nothing.segment, nothing.inputs, nothing.is_last) == (0, {}, False)
    talk.segment("s1")
    assert updates(back()) == [(0, 1, "s1")]


def test_the_state_tells_how_the_streaming_stands() -> None:
    talk = Talk()
    streaming = talk.machine.state.public.streaming
    assert (streaming.enabled, streaming.segment_finished, streaming.new_prompt_len_snapshot) == (True, False, None)
    talk.accepted(0)
    talk.ended(0, to=[1])
    assert (streaming.segment_finished, streaming.new_prompt_len_snapshot) == (True, 3)
    assert streaming.bridge_states == {"0-1": 1}
    talk.segment("s1")
    assert not streaming.segment_finished


def test_memory_stays_flat_over_many_segments() -> None:
    """A thousand segments, each shown and ended: nothing of the old ones is kept."""
    graph = StageGraph(parse_deploy(PAIR, "test.yaml"))
    segments = Segments(graph.plan(), {"prompt": "s0"})
    segments.forget_past()
    segments.steps()
    for number in range(1, 1000):
        segments.ended(0, [wire.PayloadRef(from_stage=0, to_stage=1, key="k", connector="c", size_bytes=1)])
        segments.add({"prompt": f"s{number}"})
        segments.steps()
        segments.ended(1)
    assert all(len(lane.waiting) + len(lane.segments) + len(lane.gathered) < 8 for lane in segments._lanes.values())
    assert segments._kept is None


@pytest.mark.attack("A9")
def test_only_the_client_is_waited_for_where_no_stage_has_anything_left_to_do() -> None:
    """1. a segment is worked on by the first stage, then by the second: the client is not waited for
    2. both have ended it; 3. the next one came; 4. both have ended that, and then the input has ended
    """
    segments = Segments(StageGraph(parse_deploy(PAIR, "test.yaml")).plan(), {"prompt": "s0"})
    handed = [wire.PayloadRef(from_stage=0, to_stage=1, key="k", connector="c", size_bytes=1)]
    seen = [segments.waits_for_client]

    def look() -> None:
        segments.steps()
        seen.append(segments.waits_for_client)

    for step in (
        lambda: None,
        lambda: segments.ended(0, handed),
        lambda: segments.ended(1),
        lambda: segments.add({"prompt": "s1"}),
        lambda: segments.ended(0, handed),
        lambda: segments.ended(1),
        lambda: segments.add(None),
    ):
        step()
        look()
    assert seen == [False, False, False, True, False, False, True, False]


def loss(**fields: Any) -> Loss:
    usual: dict[str, Any] = {"permanent": False, "exhausted": False, "poison": False, "handoff_gone": False}
    return Loss(**{**usual, "shown": Shown.NOTHING, "request_shown": False, **fields})


def two_segments(max_kept_bytes: int = 1 << 20) -> Segments:
    """Stage 0 works on the second segment, stage 1 on the first."""
    segments = Segments(StageGraph(parse_deploy(PAIR, "test.yaml")).plan(), {"prompt": "s0"}, max_kept_bytes)
    segments.steps()
    segments.ended(0, [wire.PayloadRef(from_stage=0, to_stage=1, key="k", connector="c", size_bytes=1)])
    segments.add({"prompt": "s1"})
    segments.steps()
    return segments


def test_a_stage_on_its_first_segment_is_run_again_and_one_behind_it_begins_the_request_anew() -> None:
    segments = two_segments()
    assert (segments.is_first(0), segments.is_first(1)) == (False, True)
    assert segments.decide(1, loss()).verdict is Verdict.AGAIN
    assert segments.decide(1, loss(shown=Shown.TOKENS, request_shown=True)).verdict is Verdict.CONTINUE
    assert segments.decide(0, loss(shown=Shown.TOKENS)).verdict is Verdict.RESTART
    assert segments.decide(0, loss(exhausted=True)).verdict is Verdict.FAIL
    assert "only that replica knew" in segments.decide(0, loss(request_shown=True)).why


@pytest.mark.parametrize("stage_id", [0, 1])
def test_where_the_segments_are_not_kept_no_request_begins_anew(stage_id: int) -> None:
    """Also for a stage on its first segment, whose hand-off is gone: only the whole request can make it again."""
    segments = two_segments()
    assert segments.decide(stage_id, loss(handoff_gone=True)).verdict is Verdict.RESTART
    decision = two_segments(max_kept_bytes=10).decide(stage_id, loss(handoff_gone=True))
    assert (decision.verdict, decision.why) == (
        Verdict.FAIL,
        "the segments so far are too long to be kept for another replica",
    )
    shown = segments.decide(stage_id, loss(handoff_gone=True, request_shown=True, all_deterministic=True))
    assert shown.verdict is Verdict.FAIL


def test_segments_are_kept_up_to_so_many_bytes() -> None:
    size = memory_of_value({"prompt": "s0"}, 1 << 20)
    assert two_segments(2 * size)._kept is not None
    assert two_segments(2 * size - 1)._kept is None


@pytest.mark.attack("Z77")
def test_segments_of_many_empty_lists_are_kept_no_longer_than_their_memory_allows() -> None:
    """One takes a byte of a message, and sixty times that in memory."""
    segments = two_segments(max_kept_bytes=4 << 20)
    added = 0
    while segments._kept is not None:
        segments.add({"messages": [{"role": "user", "content": "a", "x": [[] for _ in range(5300)]}]})
        added += 1
    assert added == 4


def test_each_stage_tells_which_segment_it_works_on() -> None:
    segments = two_segments()
    assert [segments.segment_of(stage_id) for stage_id in (0, 1)] == [1, 0]
    assert [segments.inputs_of(stage_id) for stage_id in (0, 1)] == [{"prompt": "s1"}, {"prompt": "s0"}]
    assert (segments.arrived, segments.is_complete, segments.waits) == (2, False, False)
    segments.ended(0)
    assert (segments.is_idle(0), segments.segment_of(0), segments.inputs_of(0)) == (True, 1, {})
    segments.add(None)
    assert (segments.arrived, segments.is_complete, segments.waits) == (2, True, True)
    assert [step.item.is_end for step in segments.steps()] == [True]
    assert (segments.is_ending(0), segments.segment_of(0), segments.waits) == (True, 1, False)
    segments.ended(0)
    assert (segments.is_over(0), segments.is_over(1), segments.is_ending(0)) == (True, False, False)


def test_a_restart_begins_with_all_segments_at_the_first_stage() -> None:
    segments = two_segments()
    segments.restart()
    (first,) = segments.steps()
    assert (first.stage_id, first.number, first.item.inputs, first.kept_from) == (0, 0, {"prompt": "s0"}, 0)
    assert segments.waits
