"""RequestMachine when part of the output was shown: it goes on elsewhere, without a gap and without a repetition."""

from __future__ import annotations

from typing import Any

import pytest

from hub.request import events as ev
from omni_discovery import wire
from omni_discovery.errors import InvalidRequestError, PoisonousRequestError, ReplicaLostError, StageUnavailableError
from omni_discovery.wire import FailureKind
from tests.support.request_walk import Walk, at_picture, finish_of, of


def talking(*words: str, **more: Any) -> Walk:
    """Only text is wanted; one replica has shown these words."""
    walk = Walk(**{"modalities": ["text"], "params": {}, **more})
    walk.tell(ev.Submitted())
    walk.accepted(0)
    walk.words(0, *words)
    return walk


def shown(walk: Walk) -> str:
    return "".join(action.output.text for action in of(walk.actions, ev.Emit))


# ---- tokens


def test_an_answer_is_continued_behind_what_was_shown_over_all_attempts() -> None:
    """1. the first replica shows two words and dies: the second goes on behind them, its pieces counted from 0
    2. it shows one and dies: the third goes on behind all three
    3. the client has seen four words, once each, and the usage is the last replica's, which is the whole answer's
    """
    walk = talking("one ", "two ")
    retry, dispatch = of(walk.lost(0), ev.Retry, ev.Dispatch)
    assert (retry.resumed, dispatch.is_retry) == (True, True)
    assert dispatch.resume == wire.Resume(token_ids=(4, 4), text="one two ")
    walk.accepted(0, replica_id=1)
    walk.words(0, "three ")
    (dispatch,) = of(walk.lost(0), ev.Dispatch)
    assert dispatch.resume == wire.Resume(token_ids=(4, 4, 6), text="one two three ")
    walk.accepted(0, replica_id=2)
    walk.words(0, "four")
    actions = walk.done(0, 1)
    assert finish_of(actions).outcome is ev.Outcome.OK
    assert shown(walk) == "one two three four"
    assert of(actions, ev.Emit)[0].output.usage == {"n": 1}
    assert of(actions, ev.Emit)[0].output.replica == "0/2"


def test_the_timings_of_a_continued_answer_count_from_where_it_began() -> None:
    """Sent at 2, first word at 4, lost at 5, sent again at 6, done at 9."""
    walk = talking("one ")
    walk.lost(0)
    walk.accepted(0, replica_id=1)
    walk.words(0, "two")
    timings_s = of(walk.done(0, 1), ev.Emit)[-1].output.timings_s
    assert timings_s["stage0.first_output"] == 2.0
    assert timings_s["stage0.total"] == 7.0
    assert timings_s["total"] == 8.0


def test_the_timings_of_an_attempt_that_showed_nothing_do_not_count() -> None:
    walk = talking()
    walk.lost(0)
    walk.accepted(0, replica_id=1)
    walk.words(0, "one")
    assert of(walk.done(0, 1), ev.Emit)[-1].output.timings_s["stage0.first_output"] == 2.0


def test_a_whole_answer_whose_end_was_lost_ends_with_the_next_replicas_word() -> None:
    walk = talking("all")
    walk.lost(0)
    walk.accepted(0, replica_id=1)
    assert finish_of(walk.done(0, 0)).outcome is ev.Outcome.OK
    assert shown(walk) == "all"


def test_a_missing_piece_of_a_stream_is_asked_of_another_replica() -> None:
    walk = talking("one ")
    actions = walk.chunk(0, 2, "three", token_ids=[5])
    assert actions[0] == ev.Drop("gap")
    (dispatch,) = of(actions, ev.Dispatch)
    assert (dispatch.resume, dispatch.avoid) == (wire.Resume(token_ids=(4,), text="one "), {"tcp://0-0:1"})


def test_a_continuation_that_is_rejected_moves_on_with_the_same_resumption_and_draws_nothing() -> None:
    walk = talking("one ")
    (first,) = of(walk.lost(0), ev.Dispatch)
    walk.sent(0, replica_id=1)
    (second,) = of(walk.rejected(0, FailureKind.OVERLOADED), ev.Dispatch)
    assert (second.resume, second.is_retry) == (first.resume, False)


def test_what_can_not_be_resumed_ends_with_the_loss_and_the_obstacle() -> None:
    walk = talking("one ")
    walk.lost(0)
    walk.accepted(0, replica_id=1)
    error = finish_of(walk.failed(0, FailureKind.NOT_RESUMABLE, "stop: it lags")).error
    assert isinstance(error, ReplicaLostError)
    assert "0/1: stop: it lags" in str(error)
    assert "0/0: it died" in str(error)


@pytest.mark.attack("F5")
def test_of_more_output_than_can_be_continued_nothing_is_kept() -> None:
    """1. a replica sends token ids without text, and without end: the client gets them, the hub soon keeps none
    2. the replica is lost: no other continues, and the error says why
    """
    walk, token_ids = talking(), list(range(1000, 51_000))
    for seq in range(8):
        (emitted,) = of(walk.chunk(0, seq, "", token_ids=token_ids), ev.Emit)
        assert len(emitted.output.token_ids) == len(token_ids)
    seen = walk.machine.state.runs[0].seen
    assert (seen.token_ids, seen.is_long, seen.chunks) == ([], True, 8)
    assert "more of the output was shown than a hub keeps" in str(finish_of(walk.lost(0)).error)


@pytest.mark.attack("F5")
def test_long_answers_in_single_words_are_kept_in_few_pieces_and_continued() -> None:
    walk = talking()
    for seq in range(3000):
        walk.chunk(0, seq, f"{seq} ", token_ids=[seq])
    assert len(walk.machine.state.runs[0].seen.texts) <= 1025
    (dispatch,) = of(walk.lost(0), ev.Dispatch)
    text = "".join(f"{seq} " for seq in range(3000))
    assert dispatch.resume == wire.Resume(token_ids=tuple(range(3000)), text=text)


def test_nobody_left_to_continue_is_told_with_the_loss_before() -> None:
    walk = talking("one ")
    walk.lost(0)
    error = finish_of(walk.tell(ev.StageUnavailable(0, 1, "nobody"))).error
    assert isinstance(error, StageUnavailableError)
    assert "it died" in str(error)


def test_an_answer_that_nobody_was_shown_begins_at_the_beginning() -> None:
    walk = Walk(modalities=["image"])
    walk.tell(ev.Submitted())
    walk.accepted(0)
    walk.words(0, "one ")
    (dispatch,) = of(walk.lost(0), ev.Dispatch)
    assert dispatch.resume is None


def test_text_beside_the_tokens_goes_with_them_and_a_picture_does_not() -> None:
    """A piece of text may come without a token of its own; what a picture among tokens means, nobody knows."""
    walk = talking("one ")
    walk.chunk(0, 1, "!")
    assert of(walk.lost(0), ev.Dispatch)[0].resume == wire.Resume(token_ids=(4,), text="one !")
    walk = talking("one ")
    walk.chunk(0, 1, "", attachments=[b"png"])
    assert isinstance(finish_of(walk.lost(0)).error, ReplicaLostError)


# ---- pieces


def painting(*pictures: bytes) -> Walk:
    walk = at_picture()
    for seq, picture in enumerate(pictures):
        walk.chunk(1, seq, "", attachments=[picture])
    return walk


def test_pictures_that_were_shown_are_made_again_and_not_shown_again() -> None:
    """1. two pieces were shown, the replica dies: another begins anew, and is asked for no continuation
    2. that one shows the first piece again and dies, too; 3. the third makes three: only the last one is new
    """
    walk = painting(b"a", b"b")
    (dispatch,) = of(walk.lost(1), ev.Dispatch)
    assert (dispatch.resume, len(dispatch.payloads)) == (None, 1)
    walk.accepted(1, replica_id=1)
    assert walk.chunk(1, 0, "", attachments=[b"a"]) == []
    walk.lost(1)
    walk.accepted(1, replica_id=2)
    for seq, picture in enumerate([b"a", b"b", b"c"]):
        walk.chunk(1, seq, "", attachments=[picture])
    assert finish_of(walk.done(1, 3)).outcome is ev.Outcome.OK
    assert [action.output.data for action in of(walk.actions, ev.Emit) if action.output.data] == [b"a", b"b", b"c"]


def test_a_second_run_that_makes_less_than_was_shown_is_not_believed() -> None:
    walk = painting(b"a", b"b")
    walk.lost(1)
    walk.accepted(1, replica_id=1)
    walk.chunk(1, 0, "", attachments=[b"a"])
    (dispatch,) = of(walk.done(1, 1), ev.Dispatch)
    assert dispatch.attempt == 2


# ---- who must not be hurt


def test_a_request_that_kills_engines_gets_no_third_replica() -> None:
    walk = talking(attempts=9)
    walk.failed(0, FailureKind.ENGINE, "the engine died: RuntimeError: out of memory")
    walk.accepted(0, replica_id=1)
    error = finish_of(walk.failed(0, FailureKind.ENGINE, "the engine died: RuntimeError: out of memory")).error
    assert isinstance(error, PoisonousRequestError)
    assert "too many replicas were lost with this work on them" in str(error)


def test_a_request_whose_first_replica_is_killed_by_another_is_told_of_a_loss_and_may_come_again() -> None:
    """All that is in flight on an engine dies with it: one death does not make it the request's own fault."""
    walk = talking()
    walk.chunk(0, 0)
    error = finish_of(walk.failed(0, FailureKind.ENGINE, "the engine died: RuntimeError: not mine")).error
    assert isinstance(error, ReplicaLostError)
    assert error.retry_after_s is not None
    walk = talking()
    walk.failed(0, FailureKind.ENGINE, "the engine died: RuntimeError: not mine")
    assert isinstance(finish_of(walk.tell(ev.StageUnavailable(0, 1, "nobody"))).error, StageUnavailableError)


def test_replicas_that_end_count_whether_they_had_accepted_or_not_and_others_do_not() -> None:
    """1. the first one ends before its word can have come: the work is a suspect
    2. one refuses, one never got it, one is too slow: none of them has ended
    3. the next one ends, too
    """
    walk = Walk(attempts=9)
    walk.tell(ev.Submitted())
    walk.sent(0)
    walk.lost(0)
    walk.lost(0, may_have_run=False)
    walk.sent(0)
    walk.rejected(0, FailureKind.DRAINING)
    walk.sent(0)
    walk.lost(0, avoid_addr="tcp://0-0:1", has_ended=False)
    walk.sent(0, replica_id=1)
    assert isinstance(finish_of(walk.lost(0)).error, PoisonousRequestError)
    assert suspects(walk) == [(), *[("0/0",)] * 4]


def test_a_suspect_that_was_tried_beside_others_is_tried_once_more() -> None:
    walk = talking(attempts=9)
    walk.lost(0)
    walk.accepted(0, replica_id=1)
    walk.tell(ev.TriedTogether(0, walk.attempt(0)))
    assert of(walk.lost(0), ev.Dispatch)
    walk.accepted(0, replica_id=2)
    assert isinstance(finish_of(walk.lost(0)).error, PoisonousRequestError)
    assert suspects(walk) == [(), ("0/0",), ("0/0", "0/1")]


def test_a_stage_that_is_done_is_not_hurt_by_the_loss_of_its_replica() -> None:
    walk = at_picture()
    assert walk.lost(0) == []
    assert walk.machine.is_out(1, 0)


# ---- whether to move


@pytest.mark.parametrize(
    ("walk", "expected"),
    [
        (talking(), True),
        (talking("one"), True),
        (talking("one", params={"stop": ["x"]}), False),
        (talking("one", attempts=1), False),
        (painting(b"a"), None),
        (at_picture(), None),
    ],
    ids=["nothing shown", "tokens", "doubtful", "no attempts left", "a picture", "a hand-off"],
)
def test_work_moves_at_once_where_it_is_sure_to_go_on(walk: Walk, expected: bool | None) -> None:
    """With a hand-off, too: it is kept where it was made."""
    if expected is None:
        assert walk.machine.can_move(1)
    else:
        assert walk.machine.can_move(0) is expected


def test_text_without_token_ids_waits_for_its_replica() -> None:
    walk = talking()
    walk.chunk(0, 0)
    assert not walk.machine.can_move(0)


def test_the_priority_goes_with_every_dispatch() -> None:
    walk = Walk(priority=-3)
    walk.tell(ev.Submitted())
    walk.accepted(0)
    walk.lost(0)
    assert [action.priority for action in of(walk.actions, ev.Dispatch)] == [-3, -3]


# ---- suspects


def suspects(walk: Walk) -> list[tuple[str, ...]]:
    """Whom each dispatch says that the work is blamed for."""
    return [tuple(str(each) for each in action.blamed_for) for action in of(walk.actions, ev.Dispatch)]


def test_work_is_a_suspect_where_a_replica_died_before_any_output_of_it_came() -> None:
    """1. the first replica dies with it before any output: it is a suspect
    2. the second one puts something out: it is none any more, and its replica is free for the next suspect
    """
    walk = talking(attempts=9)
    walk.lost(0)
    walk.accepted(0, replica_id=1)
    (acquit, *_) = walk.chunk(0, 0, "one", token_ids=[3])
    assert acquit == ev.Acquit(0)
    assert of(walk.chunk(0, 1, "two", token_ids=[4]), ev.Acquit) == []
    assert suspects(walk) == [(), ("0/0",)]


def test_work_whose_output_came_is_a_suspect_only_for_the_second_death() -> None:
    walk = talking("one", attempts=9)
    walk.lost(0)
    walk.accepted(0, replica_id=1)
    walk.words(0, "two")
    walk.lost(0)
    assert suspects(walk) == [(), (), ("0/1",)]
    walk.accepted(0, replica_id=2)
    walk.words(0, "three")
    assert isinstance(finish_of(walk.lost(0)).error, PoisonousRequestError)


def test_a_second_death_before_any_output_makes_it_the_culprit_of_both() -> None:
    """Its client is told with a 500, and not with the 503 after which clients send a request again."""
    walk = talking(attempts=9)
    walk.lost(0)
    walk.accepted(0, replica_id=1)
    actions = walk.lost(0)
    (convict,) = of(actions, ev.Convict)
    assert [str(each) for each in convict.blamed_for] == ["0/0", "0/1"]
    error = finish_of(actions).error
    assert isinstance(error, PoisonousRequestError)
    assert "(lost with it: 0/0, 0/1)" in str(error)


def test_two_lives_of_one_replica_are_not_told_as_a_repetition_by_mistake() -> None:
    """The supervisor starts the next process under the same id, and the request kills that, too."""
    walk = talking(attempts=9)
    walk.lost(0)
    walk.accepted(0, replica_id=0)
    error = finish_of(walk.lost(0)).error
    assert isinstance(error, PoisonousRequestError)
    assert "(lost with it: 0/0 twice)" in str(error)
    ref = ev.ReplicaRef(0, 1, 5, "tcp://h:1")
    assert ev.lives_text([ref, ref, ev.ReplicaRef(0, 2, 6, "tcp://h:2"), ref]) == "0/1 3 times, 0/2"


def test_work_of_a_death_that_has_another_cause_begins_with_a_clean_sheet() -> None:
    walk = talking(attempts=9)
    walk.lost(0)
    assert walk.tell(ev.FoundInnocent(0, walk.attempt(0))) == []
    walk.accepted(0, replica_id=1)
    walk.lost(0)
    assert suspects(walk) == [(), ("0/0",), ("0/1",)]


def test_a_rejection_or_a_gap_is_no_death() -> None:
    walk = talking(attempts=9)
    walk.chunk(0, 3)
    walk.sent(0, replica_id=1)
    walk.rejected(0, FailureKind.OVERLOADED)
    assert suspects(walk) == [(), (), ()]


# ---- what no message holds


@pytest.mark.attack("I7")
def test_an_answer_that_is_too_long_to_be_continued_is_no_fault_of_its_client() -> None:
    """1. two words were shown and the replica dies; 2. with them, the request fits into no message
    3. the error is that of the lost replica, and says both; a request that fits by itself is not called wrong
    """
    walk = talking("one ", "two ")
    walk.lost(0)
    error = finish_of(walk.tell(ev.DispatchRefused(0, walk.attempt(0), "5 bytes are more than the 4"))).error
    assert isinstance(error, ReplicaLostError)
    assert "with the answer so far, the request fits into no message to another replica: 5 bytes are more" in str(error)
    assert "that was needed because of this: stage 0 replica 0/0: it died" in str(error)
    assert walk.machine.runs[0].failure is error


def test_a_request_that_no_message_holds_by_itself_is_wrong() -> None:
    """At the first attempt, and at another behind which nothing was shown."""
    for is_retry in (False, True):
        walk = Walk(modalities=["text"])
        walk.tell(ev.Submitted())
        if is_retry:
            walk.accepted(0)
            walk.lost(0)
        error = finish_of(walk.tell(ev.DispatchRefused(0, walk.attempt(0), "5 bytes are more than the 4"))).error
        assert isinstance(error, InvalidRequestError)
        assert str(error) == "5 bytes are more than the 4"
