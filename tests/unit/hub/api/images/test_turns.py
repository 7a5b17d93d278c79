"""Events of several pictures whose unfinished ones don't say which they are of."""

from __future__ import annotations

from hub.api.images.turns import PictureTurns


def test_a_picture_that_is_done_early_waits_for_its_turn_and_shows_nothing_unfinished() -> None:
    """1. request 1 is done before request 0: its picture is held
    2. request 0 is done and over: both are sent, and it is the turn of request 2
    """
    turns = PictureTurns(are_kept=True)
    assert [turns.is_turn_of(number) for number in range(3)] == [True, False, False]
    assert turns.finished(1, b"one") == []
    assert turns.request_over(1) == []
    assert turns.finished(0, b"zero") == [b"zero"]
    assert turns.request_over(0) == [b"one"]
    assert turns.is_turn_of(2)
    assert turns.finished(2, b"two") == [b"two"]
    assert turns.request_over(2) == []


def test_a_request_may_draw_several_pictures_or_none() -> None:
    turns = PictureTurns(are_kept=True)
    assert turns.finished(2, b"c") == turns.finished(2, b"d") == []
    assert turns.request_over(0) == []
    assert turns.is_turn_of(1)
    assert turns.request_over(1) == [b"c", b"d"]
    assert turns.is_turn_of(2)


def test_what_is_held_is_sent_before_the_error_that_ends_all() -> None:
    turns = PictureTurns(are_kept=True)
    turns.finished(2, b"two")
    turns.finished(1, b"one")
    assert turns.rest() == [b"one", b"two"]
    assert turns.rest() == []


def test_without_unfinished_pictures_all_are_sent_as_they_come() -> None:
    turns = PictureTurns(are_kept=False)
    assert turns.finished(1, b"one") == [b"one"]
    assert turns.request_over(1) == []
    assert turns.finished(0, b"zero") == [b"zero"]
    assert not any(turns.is_turn_of(number) for number in range(3))
