"""RequestMachine where replicas declare that they are deterministic: whoever is lost, the same answer goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from hub.request import events as ev
from hub.request.state import RequestState
from omni_discovery import wire
from omni_discovery.errors import ReplicaLostError
from omni_discovery.wire import FailureKind
from tests.support.request_walk import Heard, Walk, chunk, done, finish_of, heard, of

#: A thinker and a talker that nobody hears, and a decoder.
SPEECH = """
async_chunk: true
stages:
  - {stage_id: 0, engine: e}
  - {stage_id: 1, engine: e}
  - {stage_id: 2, engine: e, final_output: audio}
"""
#: The same with the thinker's text.
WITH_TEXT = SPEECH.replace("0, engine: e", "0, engine: e, final_output: text")
WHOLE = WITH_TEXT.replace("async_chunk: true", "async_chunk: false")
SOUNDS = tuple(b"RIFF" + bytes(40) + bytes([number, 7]) * 400 for number in range(8))


class Speaking(Walk):
    """A machine whose replicas declare what ``deterministic`` says, and short ways to tell it of pieces and sounds."""

    def __init__(self, deploy: str = SPEECH, deterministic: Sequence[int] = (0, 1, 2), **more: Any) -> None:
        super().__init__(deploy, params={}, **more)
        self.deterministic = set(deterministic)
        self.tell(ev.Submitted())

    def piece(self, stage_id: int, number: int) -> list[ev.Action]:
        message = wire.HandOffPiece(
            epoch=7,
            request_id="r1",
            attempt=0,
            number=number,
            payloads=done(stage_id, 0, [stage_id + 1]).payloads,
            queue_length=0,
        )
        return self.tell(heard(stage_id, self.attempt(stage_id), message))

    def sounds(self, *numbers: int, stage_id: int = 2) -> list[bytes]:
        """The decoder puts these out; what the client hears of them."""
        actions = [action for number in numbers for action in self.sound(number, stage_id)]
        return [action.output.data for action in of(actions, ev.Emit)]

    def sound(self, number: int, stage_id: int = 2, file: bytes = b"") -> list[ev.Action]:
        seq = self.machine.runs[stage_id].next_seq
        message = msgspec.structs.replace(chunk(seq, ""), modality="audio", mime="audio/wav")
        return self.tell(heard(stage_id, self.attempt(stage_id), message, [file or SOUNDS[number]]))

    def end(self, stage_id: int, to: Sequence[int] = ()) -> list[ev.Action]:
        run = self.machine.runs[stage_id]
        message = msgspec.structs.replace(done(stage_id, run.next_seq, to), pieces=run.next_piece)
        return self.tell(heard(stage_id, run.attempt, message))

    def begin_chain(self, replica_id: int = 0) -> None:
        """Every stage is at work on the first piece of the one before; stages that are at work already are left."""
        for stage_id in (0, 1, 2):
            if self.machine.runs[stage_id].replica is None:
                self.accepted(stage_id, replica_id)
            if stage_id < 2 and not self.machine.runs[stage_id].next_piece:
                self.piece(stage_id, 0)


def speaking(**more: Any) -> Speaking:
    """The chain is at work, and the client has heard two sounds."""
    walk = Speaking(**more)
    walk.begin_chain()
    assert walk.sounds(0, 1) == list(SOUNDS[:2])
    return walk


def finish(walk: Speaking) -> ev.Finish:
    """The chain ends as it should."""
    walk.end(0)
    walk.end(1)
    return finish_of(walk.end(2))


# ---- losses


@pytest.mark.parametrize("lost", [[0], [1], [2], [0, 1], [1, 0], [1, 2], [2, 1], [0, 2], [2, 1, 0], [0, 1, 2]])
def test_whoever_is_lost_the_client_hears_each_sound_once(lost: Sequence[int]) -> None:
    """1. two sounds were heard; replicas are lost, one or several in any order
    2. those behind the first of them run again, and make the first sounds again: nobody hears these
    3. the third sound is heard, and the request ends well
    """
    walk = speaking()
    for stage_id in lost:
        actions = walk.lost(stage_id)
        assert not of(actions, ev.Finish)
    walk.begin_chain(replica_id=1)
    assert walk.sounds(0, 1, 2) == [SOUNDS[2]]
    assert finish(walk).outcome is ev.Outcome.OK
    assert [action.output.data for action in of(walk.actions, ev.Emit) if action.output.data] == list(SOUNDS[:3])


@pytest.mark.parametrize(("declared", "doubtful"), [((), 0), ((1, 2), 0), ((0, 2), 1), ((0, 1), 2)])
def test_a_chain_with_a_stage_that_does_not_declare_it_ends_with_its_name(
    declared: Sequence[int], doubtful: int
) -> None:
    walk = speaking(deterministic=declared)
    assert not walk.machine.can_move(0)
    error = finish_of(walk.lost(0)).error
    assert isinstance(error, ReplicaLostError)
    assert "not sure to be made again" in str(error)
    assert f"stage {doubtful} is not declared deterministic" in str(error)


def test_a_loss_behind_the_stage_that_does_not_declare_it_is_mended() -> None:
    walk = speaking(deterministic=(1, 2))
    assert walk.machine.can_move(1)
    walk.lost(1)
    walk.begin_chain(replica_id=1)
    assert walk.sounds(0, 1, 2) == [SOUNDS[2]]


def test_a_replica_of_the_release_before_makes_the_next_loss_final() -> None:
    """1. a talker that declares it is lost, and one that does not takes over: its sounds are compared all the same
    2. it is lost, too: what it has made may not come again
    """
    walk = speaking()
    walk.lost(1)
    walk.deterministic = {0, 2}
    walk.begin_chain(replica_id=1)
    assert walk.sounds(0, 1, 2) == [SOUNDS[2]]
    assert "stage 1 is not declared deterministic" in str(finish_of(walk.lost(1)).error)


def test_what_comes_out_otherwise_ends_the_request_and_is_not_heard() -> None:
    walk = speaking()
    walk.lost(1)
    walk.begin_chain(replica_id=1)
    assert walk.sounds(0) == []
    actions = walk.sound(1, file=SOUNDS[5])
    error = finish_of(actions).error
    assert isinstance(error, ReplicaLostError)
    assert "piece 1 is another than the one that had been shown" in str(error)
    assert not of(actions, ev.Emit)
    assert {action.stage_id for action in of(actions, ev.Abort)} == {0, 1, 2}


def test_an_attempt_that_ends_before_what_was_shown_ends_the_request() -> None:
    walk = speaking()
    walk.lost(2)
    walk.accepted(2, 1)
    walk.sounds(0)
    walk.end(0)
    walk.end(1)
    assert "ended before all came again" in str(finish_of(walk.end(2)).error)


def test_a_loss_during_the_repetition_begins_it_anew() -> None:
    walk = speaking()
    walk.lost(2)
    walk.accepted(2, 1)
    assert walk.sounds(0) == []
    walk.lost(2)
    walk.accepted(2, 2)
    assert walk.sounds(0, 1, 2) == [SOUNDS[2]]


def test_words_that_were_shown_are_made_again_and_dropped_in_whatever_chunks() -> None:
    """A deterministic thinker with a seed: another can't continue behind its words, but says them again."""
    walk = Speaking(WITH_TEXT)
    walk.accepted(0)
    walk.words(0, "one ", "two ")
    (dispatch,) = of(walk.lost(0), ev.Dispatch)
    assert dispatch.resume is None
    walk.accepted(0, 1)
    emitted = of(walk.chunk(0, 0, "one two three ", token_ids=[4, 4, 6]), ev.Emit)
    assert [(action.output.text, action.output.token_ids) for action in emitted] == [("three ", (6,))]


def test_a_word_that_is_another_ends_the_request() -> None:
    walk = Speaking(WITH_TEXT)
    walk.accepted(0)
    walk.words(0, "one ", "two ")
    walk.lost(0)
    walk.accepted(0, 1)
    error = finish_of(walk.chunk(0, 0, "one three ", token_ids=[4, 6])).error
    assert "token 1 is another" in str(error)
    assert "that was needed because of this: stage 0 replica 0/0: it died" in str(error)


def ended_talker(deploy: str = SPEECH, **more: Any) -> Speaking:
    """The thinker and the talker have ended, the decoder has put out two sounds."""
    walk = speaking(deploy=deploy, **more)
    walk.end(0)
    walk.end(1)
    return walk


def test_a_decoder_that_is_lost_with_the_talker_that_had_ended_has_the_request_run_again() -> None:
    """Both were on one host: the pieces are gone with it, and only the whole request can make them again."""
    walk = ended_talker()
    walk.lost(2)
    walk.accepted(2, 1)
    actions = walk.failed(2, FailureKind.PAYLOAD, "no such piece")
    assert [action.stage_id for action in of(actions, ev.Dispatch)] == [0]
    walk.begin_chain(replica_id=1)
    assert walk.sounds(0, 1, 2) == [SOUNDS[2]]
    assert finish(walk).outcome is ev.Outcome.OK


def test_a_stage_whose_end_was_shown_runs_again_unseen() -> None:
    """1. the thinker's text was shown to its end; then its hand-off is gone, with the host that the talker was on, too
    2. all runs again: the text does not come twice, and neither does its end
    """
    walk = Speaking(WHOLE)
    walk.accepted(0)
    walk.words(0, "one ", "two")
    walk.end(0, to=[1])
    walk.accepted(1)
    actions = walk.failed(1, FailureKind.PAYLOAD)
    assert [action.stage_id for action in of(actions, ev.Dispatch)] == [0]
    walk.accepted(0, 1)
    again = walk.words(0, "one ", "two") + walk.end(0, to=[1])
    assert not of(again, ev.Emit)
    walk.accepted(1, 1)
    walk.end(1, to=[2])
    walk.accepted(2)
    assert walk.sounds(0) == [SOUNDS[0]]
    assert finish_of(walk.end(2)).outcome is ev.Outcome.OK
    ends = [action.output for action in of(walk.actions, ev.Emit) if action.output.finish_reason is not None]
    assert [end.stage_id for end in ends if not end.is_summary] == [0, 2]


def test_a_hand_off_of_a_stage_that_does_not_declare_it_is_not_made_twice_once_anything_was_shown() -> None:
    walk = ended_talker(deterministic=(0, 2))
    walk.lost(2)
    walk.accepted(2, 1)
    error = finish_of(walk.failed(2, FailureKind.PAYLOAD, "no such piece")).error
    assert "is not made twice" in str(error)


def test_companions_and_segments_are_treated_as_if_nothing_was_declared() -> None:
    """What a companion hands over, or an earlier segment, is not compared."""
    walk = Walk(WITH_TEXT, params={}, companions={"negative": {"prompt": "no"}})
    walk.deterministic = {0, 1, 2}
    walk.tell(ev.Submitted())
    walk.accepted(0)
    assert not walk.machine.state.all_deterministic
    state = RequestState("r1", {"prompt": "hi"}, walk.machine.state.plan, {}, segmented=True)
    assert not state.all_deterministic


# ---- seeds


def seeds(actions: Sequence[ev.Action], *, deterministic: bool = True) -> list[Any]:
    return [action.params_for(deterministic=deterministic).get("seed") for action in of(actions, ev.Dispatch)]


def test_a_request_without_a_seed_gets_one_for_all_attempts_and_shows_it() -> None:
    """1. a stage with temperature 1 and no seed is sent to a deterministic replica: it gets the hub's seed
    2. the replica is lost: the next one gets the same; 3. the request's state says which
    """
    walk = Walk(WITH_TEXT, params={"temperature": 1.0})
    walk.deterministic = {0, 1, 2}
    (first,) = seeds(walk.tell(ev.Submitted()))
    assert 0 <= first < 1 << 62
    walk.accepted(0)
    assert walk.machine.state.public.sampling_params_list[0] == {"temperature": 1.0, "seed": first}
    walk.words(0, "one ")
    assert seeds(walk.lost(0)) == [first]


def test_the_seed_of_the_client_is_kept_and_other_replicas_get_none() -> None:
    walk = Walk(WITH_TEXT, params={"seed": 5})
    walk.deterministic = {0}
    submitted = walk.tell(ev.Submitted())
    assert seeds(submitted) == [5]
    walk.accepted(0)
    assert walk.machine.state.public.sampling_params_list[0] == {"seed": 5}
    other = Walk(WITH_TEXT, params={})
    assert seeds(other.tell(ev.Submitted()), deterministic=False) == [None]
    other.accepted(0)
    assert other.machine.state.public.sampling_params_list[0] == {}


def test_once_a_stage_has_had_the_seed_every_attempt_gets_it() -> None:
    """Also at a replica that declares nothing, and after the parameters were replaced by those of another document."""
    walk = Walk(WITH_TEXT, params={})
    walk.deterministic = {0}
    (first,) = seeds(walk.tell(ev.Submitted()))
    walk.accepted(0)
    walk.machine.set_params({0: {"temperature": 0.5}})
    actions = walk.lost(0)
    assert seeds(actions, deterministic=False) == [first]
    walk.deterministic = set()
    walk.accepted(0, 1)
    assert walk.machine.state.public.sampling_params_list[0] == {"temperature": 0.5, "seed": first}


def test_input_in_segments_gets_no_seed() -> None:
    """It can't be made again, and a seed would keep its first segment from being continued."""
    assert ev.Dispatch(0, 0, {}, {}, (), (), frozenset(), segmented=True, seed=3).params_for(deterministic=True) == {}
    assert ev.Dispatch(0, 0, {}, {}, (), (), frozenset(), seed=3).params_for(deterministic=True) == {"seed": 3}


def test_two_requests_have_two_seeds() -> None:
    plan = Walk(WITH_TEXT).machine.state.plan
    assert RequestState("a", {}, plan, {}).seed != RequestState("b", {}, plan, {}).seed
    assert RequestState("a", {}, plan, {}).seed == RequestState("a", {}, plan, {}).seed


def test_a_message_of_a_lost_attempt_changes_nothing_of_the_comparison() -> None:
    walk = speaking()
    walk.lost(2)
    stale = msgspec.structs.replace(chunk(2, ""), attempt=0, mime="audio/wav")
    assert of(walk.tell(Heard(2, stale, [SOUNDS[6]])), ev.Drop)
    walk.accepted(2, 1)
    assert walk.sounds(0, 1, 2) == [SOUNDS[2]]
