"""RequestMachine where stages work on each other's pieces: order, window, and what becomes of them when one is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from hub.request import events as ev
from hub.request.state import PieceRelay
from omni_discovery import wire
from omni_discovery.errors import ReplicaLostError
from omni_discovery.wire import FailureKind
from tests.support.request_walk import Walk, done, finish_of, heard, of, taken

EDGES = "edges: [{from: 0, to: 1, window_size: 2}]"
PAIR = f"""
async_chunk: true
stages: [{{stage_id: 0, engine: e, final_output: text}}, {{stage_id: 1, engine: e, final_output: audio}}]
{EDGES}
"""
#: The client sees nothing of stage 0.
HIDDEN = PAIR.replace("0, engine: e, final_output: text", "0, engine: e")
CHAIN = """
async_chunk: true
stages:
  - {stage_id: 0, engine: e, final_output: text}
  - {stage_id: 1, engine: e}
  - {stage_id: 2, engine: e, final_output: audio}
"""
DIAMOND = """
async_chunk: true
stages:
  - {stage_id: 0, engine: e, final_output: text}
  - {stage_id: 1, engine: e}
  - {stage_id: 2, engine: e, input_from: [0, 1], final_output: audio}
edges: [{from: 0, to: 2, window_size: 2}]
"""


class Flow(Walk):
    """A machine, and short ways to tell it of pieces."""

    def piece(self, stage_id: int, number: int, to: Sequence[int] = (1,)) -> list[ev.Action]:
        message = wire.HandOffPiece(
            epoch=7, request_id="r1", attempt=0, number=number, payloads=done(stage_id, 0, to).payloads, queue_length=0
        )
        return self.tell(heard(stage_id, self.attempt(stage_id), message))

    def taken(self, stage_id: int, number: int, from_stage: int = 0) -> list[ev.Action]:
        return self.tell(taken(stage_id, self.attempt(stage_id), from_stage, number))

    def end(self, stage_id: int, seq: int, pieces: int, to: Sequence[int] = ()) -> list[ev.Action]:
        message = msgspec.structs.replace(done(stage_id, seq, to), pieces=pieces)
        return self.tell(heard(stage_id, self.attempt(stage_id), message))


def begun(deploy: str = PAIR, attempts: int = 3) -> Flow:
    """Stage 0 has said a word and handed a piece on, stage 1 works on it."""
    flow = Flow(deploy, attempts=attempts, params={})
    flow.tell(ev.Submitted())
    flow.accepted(0)
    flow.words(0, "ab")
    flow.piece(0, 0)
    flow.accepted(1)
    return flow


def fed(actions: Sequence[ev.Action]) -> list[tuple[int, int, bool]]:
    """Stage, number and whether it is the last, of what is passed on."""
    return [(action.stage_id, action.number, action.payload is None) for action in of(actions, ev.FeedInput)]


def rooms(actions: Sequence[ev.Action]) -> list[tuple[int, int]]:
    """Which stage is told, and how many pieces were taken."""
    return [(action.stage_id, action.number) for action in of(actions, ev.PieceRoom)]


# ---- forward


def test_the_first_piece_begins_the_next_stage_and_each_is_passed_on_once_it_was_sent() -> None:
    """1. stage 0 is told that stage 1 takes pieces; 2. its first piece dispatches stage 1, which gets no hand-off
    3. pieces that come before stage 1 was sent follow it, in order; the end has no payload
    """
    flow = Flow(PAIR, params={})
    (first,) = flow.tell(ev.Submitted())
    assert (first.stream_to, first.stream_from) == ((1,), ())
    flow.accepted(0)
    (dispatch,) = flow.piece(0, 0)
    assert (dispatch.stage_id, dispatch.stream_from, dispatch.payloads) == (1, (0,), ())
    assert flow.piece(0, 1) == []
    assert fed(flow.sent(1)) == [(1, 0, False), (1, 1, False)]
    assert fed(flow.taken(1, 1)) == []
    assert fed(flow.piece(0, 2)) == [(1, 2, False)]
    assert fed(flow.end(0, 0, 3)) == [(1, 3, True)]
    flow.chunk(1, 0)
    assert finish_of(flow.done(1, 1)).error is None


def test_no_more_than_the_window_is_on_its_way_and_the_producer_hears_what_was_taken() -> None:
    flow = begun()
    assert fed(flow.piece(0, 1)) == [(1, 1, False)]
    assert rooms(flow.taken(1, 0)) == [(0, 1)]
    assert fed(flow.piece(0, 2)) == [(1, 2, False)]
    assert rooms(flow.taken(1, 2)) == [(0, 3)]
    assert flow.taken(1, 2) == flow.taken(1, 0) == []


@pytest.mark.attack("K3")
def test_a_piece_beyond_the_window_is_its_replicas_loss_and_nothing_of_it_is_kept() -> None:
    """1. a window of two, and nothing taken: the third piece may not come; 2. another replica does the work anew
    3. it is told nothing of the former's pieces, and may make two
    """
    flow = begun(attempts=2)
    flow.piece(0, 1)
    lost = flow.machine.runs[0].replica
    actions = flow.piece(0, 2)
    assert actions[0] == ev.Drop("window")
    assert [action.stage_id for action in of(actions, ev.Abort)] == [0, 1]
    (again,) = of(actions, ev.Dispatch)
    assert (again.stage_id, again.attempt) == (0, 1)
    assert lost is not None
    assert lost.input_addr in again.avoid
    assert not flow.machine.runs[1].streams
    assert "before stage 1 had taken enough" in str(flow.machine.runs[0].failure)


@pytest.mark.attack("Z14")
def test_a_producer_whose_references_take_too_much_memory_is_lost_and_nothing_of_them_is_kept() -> None:
    """1. a producer pads the references of its pieces, and keeps to its window: each is passed on and taken
    2. the one with which they take more than 256 MiB is its replica's loss; another begins anew, with nothing kept
    """
    flow = begun(attempts=2)
    flow.taken(1, 0)
    # One object, which counts as often as it comes.
    pad = bytes(4_000_000)
    lost, actions, number = flow.machine.runs[0].replica, list[ev.Action](), 1
    while not of(actions, ev.Drop):
        assert number < 100
        ref = msgspec.structs.replace(done(0, 0, [1]).payloads[0], metadata={"inline": b"x", "pad": pad})
        message = wire.HandOffPiece(epoch=7, request_id="r1", attempt=0, number=number, payloads=(ref,), queue_length=0)
        actions = flow.tell(heard(0, 0, message))
        flow.taken(1, number)
        number += 1
    assert number == 69
    assert actions[0] == ev.Drop("reference_memory")
    (again,) = of(actions, ev.Dispatch)
    assert lost is not None
    assert (again.stage_id, lost.input_addr in again.avoid) == (0, True)
    assert not flow.machine.runs[1].streams
    assert flow.machine.state.reference_bytes == 0
    assert "more than 256 MiB" in str(flow.machine.runs[0].failure)


def test_a_window_that_was_given_before_a_consumer_was_lost_stays_given() -> None:
    """1. two pieces were taken, so that the producer may make two more; 2. their consumer is lost
    3. the next one has taken nothing yet, and the two may come all the same
    """
    flow = begun()
    flow.piece(0, 1)
    flow.taken(1, 1)
    flow.tell(ev.ReplicaLost(1, flow.attempt(1), "it is gone"))
    for number in (2, 3):
        assert not of(flow.piece(0, number), ev.Drop)
    assert of(flow.piece(0, 4), ev.Drop)


def test_what_can_not_have_been_taken_is_dropped() -> None:
    flow = begun()
    assert of(flow.taken(1, 1), ev.Drop)
    assert of(flow.taken(1, 0, from_stage=5), ev.Drop)
    assert of(flow.taken(0, 0), ev.Drop)


def test_a_piece_that_comes_twice_is_dropped_and_a_gap_is_a_loss() -> None:
    flow = begun()
    assert flow.piece(0, 0) == [ev.Drop("duplicate")]
    actions = flow.piece(0, 2)
    assert ev.Drop("gap") in actions
    assert [action.stage_id for action in of(actions, ev.Abort)] == [0, 1]


def test_a_piece_that_is_missing_at_the_end_is_a_gap() -> None:
    assert ev.Drop("gap") in begun().end(0, 1, pieces=2)


def test_a_stage_that_makes_no_pieces_hands_over_as_a_whole() -> None:
    flow = Flow(PAIR, params={})
    flow.tell(ev.Submitted())
    flow.accepted(0)
    dispatch = flow.end(0, 0, 0, to=[1])[-1]
    assert isinstance(dispatch, ev.Dispatch)
    assert (len(dispatch.payloads), dispatch.stream_from) == (1, ())


def test_a_stage_of_two_inputs_begins_when_both_have_begun_and_holds_nobody_up_before() -> None:
    flow = Flow(DIAMOND, params={})
    flow.tell(ev.Submitted())
    flow.accepted(0)
    # Stage 2 waits for stage 1, which is made of the same pieces: stage 0 may go on as far as stage 2 is concerned.
    assert rooms(flow.piece(0, 0, to=[1, 2])) == [(0, 1)]
    flow.accepted(1)
    for number in (1, 2, 3):
        assert rooms(flow.piece(0, number, to=[1, 2])) == [(0, number + 1)]
    dispatch = next(iter(of(flow.piece(1, 0, to=[2]), ev.Dispatch)))
    assert (dispatch.stage_id, dispatch.stream_from) == (2, (0, 1))
    assert fed(flow.sent(2)) == [(2, 0, False), (2, 1, False), (2, 0, False)]


def test_a_consumer_that_is_done_early_holds_nobody_up() -> None:
    flow = begun()
    flow.chunk(1, 0)
    assert not of(flow.done(1, 1), ev.Finish)
    assert rooms(flow.piece(0, 1)) == [(0, 2)]
    assert finish_of(flow.end(0, 1, 2)).error is None


# ---- losses


def test_a_producer_that_is_lost_stops_what_was_made_of_its_pieces_and_both_begin_anew() -> None:
    flow = begun(HIDDEN)
    actions = flow.lost(0)
    assert [(action.stage_id, action.attempt) for action in of(actions, ev.Abort)] == [(0, 0), (1, 0)]
    (again,) = of(actions, ev.Dispatch)
    assert (again.stage_id, again.attempt) == (0, 1)
    flow.accepted(0, 1)
    (dispatch,) = of(flow.piece(0, 0), ev.Dispatch)
    assert (dispatch.stage_id, dispatch.attempt) == (1, 1)
    assert fed(flow.sent(1)) == [(1, 0, False)]


def test_losses_of_a_producer_are_no_failures_of_what_worked_on_its_pieces() -> None:
    """1. the producer is lost twice, the stage behind it begins anew each time; 2. then that one is lost, and goes on
    3. it fails twice more: of its own three attempts none is left
    """
    flow = begun(HIDDEN)
    for attempt in (1, 2):
        flow.lost(0)
        flow.accepted(0, attempt)
        (dispatch,) = of(flow.piece(0, 0), ev.Dispatch)
        assert (dispatch.stage_id, dispatch.attempt) == (1, attempt)
        flow.accepted(1, attempt)
    (again,) = of(flow.lost(1), ev.Dispatch)
    assert (again.stage_id, again.attempt) == (1, 3)
    flow.accepted(1, 3)
    (again,) = of(flow.failed(1, FailureKind.ENGINE), ev.Dispatch)
    flow.accepted(1, 4)
    assert "no attempts are left" in str(finish_of(flow.failed(1, FailureKind.ENGINE)).error)


def test_the_loss_of_a_producer_reaches_down_the_chain() -> None:
    flow = begun(CHAIN)
    flow.piece(1, 0, to=[2])
    flow.accepted(2)
    actions = flow.lost(0)
    assert [action.stage_id for action in of(actions, ev.Abort)] == [0, 1, 2]
    assert [action.stage_id for action in of(actions, ev.Dispatch)] == [0]


def test_what_was_shown_of_both_goes_on_where_the_producer_can_go_on_behind_its_words() -> None:
    """The client has had a word of stage 0 and a picture of stage 1: neither comes a second time."""
    flow = begun()
    flow.chunk(1, 0, text="", attachments=[b"a"])
    (again,) = of(flow.lost(0), ev.Dispatch)
    assert again.resume == wire.Resume(token_ids=(2,), text="ab")
    flow.accepted(0, 1)
    flow.piece(0, 0)
    flow.accepted(1)
    assert not of(flow.chunk(1, 0, text="", attachments=[b"a"]), ev.Emit)
    assert of(flow.chunk(1, 1, text="", attachments=[b"b"]), ev.Emit)


def test_what_was_shown_of_pieces_that_nobody_saw_ends_the_request_with_the_reason() -> None:
    flow = begun(HIDDEN)
    flow.words(1, "hm")
    assert not flow.machine.can_move(0)
    actions = flow.lost(0)
    error = finish_of(actions).error
    assert isinstance(error, ReplicaLostError)
    assert "not sure to be made again" in str(error)
    assert [action.stage_id for action in of(actions, ev.Abort)] == [0, 1]


def test_a_consumer_that_nobody_can_continue_ends_the_request_with_its_producer() -> None:
    flow = begun()
    flow.chunk(1, 0, text="no ids")
    assert isinstance(finish_of(flow.lost(0)).error, ReplicaLostError)


def test_a_consumer_that_is_lost_gets_every_piece_again() -> None:
    """Its producer is left alone, and hears only of what is news to it."""
    flow = begun()
    flow.piece(0, 1)
    flow.taken(1, 1)
    flow.piece(0, 2)
    flow.words(1, "hm")
    actions = flow.lost(1)
    (dispatch,) = of(actions, ev.Dispatch)
    assert (dispatch.stage_id, dispatch.stream_from, dispatch.resume) == (
        1, (0,), wire.Resume(token_ids=(2,), text="hm"),
    )  # fmt: skip
    assert [action.stage_id for action in of(actions, ev.Abort)] == [1]
    assert fed(flow.sent(1, 1)) == [(1, 0, False), (1, 1, False)]
    actions = flow.taken(1, 1)
    assert (fed(actions), rooms(actions)) == ([(1, 2, False)], [])
    assert rooms(flow.taken(1, 2)) == [(0, 3)]


def test_pieces_that_can_not_be_had_are_the_producers_loss() -> None:
    """Its process died, and the next stage noticed it first."""
    flow = begun()
    actions = flow.failed(1, FailureKind.PAYLOAD, "no such piece")
    (dispatch,) = of(actions, ev.Dispatch)
    assert (dispatch.stage_id, dispatch.resume) == (0, wire.Resume(token_ids=(2,), text="ab"))
    assert dispatch.avoid == {"tcp://0-0:1"}


def test_pieces_of_a_producer_that_has_ended_can_only_be_made_with_the_whole_request() -> None:
    flow = begun(HIDDEN)
    flow.end(0, 1, 1)
    actions = flow.failed(1, FailureKind.PAYLOAD)
    assert [(action.stage_id, action.attempt) for action in of(actions, ev.Dispatch)] == [(0, 1)]


def test_pieces_of_an_attempt_that_was_given_up_change_nothing() -> None:
    flow = begun(HIDDEN)
    flow.lost(0)
    stale = wire.HandOffPiece(
        epoch=7, request_id="r1", attempt=0, number=1, payloads=done(0, 0, [1]).payloads, queue_length=0
    )
    assert not of(flow.tell(heard(0, 0, stale)), ev.Dispatch, ev.FeedInput)
    assert not of(flow.tell(taken(1, 0, 0, 0)), ev.FeedInput, ev.PieceRoom)


def test_what_was_on_its_way_when_a_session_broke_is_said_again() -> None:
    flow = begun()
    flow.piece(0, 1)
    flow.taken(1, 0)
    assert fed(flow.tell(ev.SessionBack(1, 0))) == [(1, 1, False)]
    (room,) = flow.tell(ev.SessionBack(0, 0))
    assert (room.number, room.again) == (1, True)
    assert flow.machine.must_repeat(0)
    assert not Flow(PAIR.replace("async_chunk: true", "")).machine.must_repeat(0)


def test_cancelling_stops_both_and_frees_what_was_handed_on() -> None:
    actions = begun().tell(ev.Cancelled())
    assert [action.stage_id for action in of(actions, ev.Abort)] == [0, 1]
    assert [action.stage_id for action in of(actions, ev.ReleasePayload)] == [0]


def test_pieces_are_freed_when_the_request_ends_though_nothing_else_was_handed_over() -> None:
    flow = begun()
    flow.end(0, 1, 1)
    actions = flow.done(1, 0)
    assert [action.stage_id for action in of(actions, ev.ReleasePayload)] == [0]


# ---- the relay


@pytest.mark.parametrize("window", [1, 2, 5, 100])
def test_a_relay_says_everything_once_and_in_order_whatever_the_window(window: int) -> None:
    relay = PieceRelay(window)
    said: list[Any] = []
    rooms_: list[int | None] = []
    for number in range(20):
        relay.add(done(0, 0, [1]).payloads[0])
        said += relay.due()
        assert len(said) <= number + 1
        if number % 3 == 0 and said:
            assert relay.acknowledge(said[-1][0])
            rooms_.append(relay.new_room(is_free=False))
            said += relay.due()
    relay.complete()
    while said[-1][1] is not None:
        assert relay.acknowledge(said[-1][0])
        said += relay.due()
    assert [number for number, _ in said] == list(range(21))
    assert [ref is None for _, ref in said] == [False] * 20 + [True]
    news = [room for room in rooms_ if room is not None]
    assert news == sorted(set(news))


def test_when_the_last_output_came_is_known_also_of_what_is_only_handed_on() -> None:
    """Chunks and pieces of a stage whose output the client does not see; what comes twice is no output."""
    flow = Flow(HIDDEN, params={})
    flow.tell(ev.Submitted())
    flow.accepted(0)
    run = flow.machine.runs[0]
    assert run.output_at_s == float("-inf")
    flow.words(0, "ab")
    assert run.output_at_s == flow.now_s
    flow.piece(0, 0)
    assert run.output_at_s == flow.now_s
    flow.piece(0, 0)
    flow.chunk(0, 0)
    assert run.output_at_s == flow.now_s - 2


@pytest.mark.parametrize("kind", [FailureKind.OVERLOADED, FailureKind.ENGINE])
def test_a_stage_that_fails_by_itself_is_not_held_against_the_one_whose_pieces_it_takes(kind: FailureKind) -> None:
    flow = begun()
    actions = flow.failed(1, kind)
    assert of(actions, ev.Abort) == []
    assert [each.stage_id for each in of(actions, ev.Dispatch)] == [1]
