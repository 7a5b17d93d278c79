"""Announced pieces that no engine has taken are bounded by their bytes, for each hub on its own."""

from __future__ import annotations

import pytest

from omni_discovery import wire
from stage_runtime.server.waiting_pieces import WaitingPieces


def feed(number: int, size_bytes: int, from_stage: int = 0) -> wire.Feed:
    ref = wire.PayloadRef(
        from_stage=from_stage, to_stage=1, key="k", connector="c", size_bytes=0, metadata={"inline": b"x" * size_bytes}
    )
    return wire.Feed(epoch=1, request_id="a", attempt=0, from_stage=from_stage, number=number, payload=ref)


@pytest.mark.attack("P32")
def test_a_hub_has_room_for_so_many_bytes_and_others_have_their_own() -> None:
    pieces = WaitingPieces(10_000)
    assert pieces.add("hub", "a", feed(0, 4_000))
    assert pieces.add("hub", "b", feed(0, 4_000))
    assert not pieces.add("hub", "a", feed(1, 4_000))
    assert pieces.add("other", "c", feed(0, 8_000))


def test_what_is_said_again_behind_a_lost_session_counts_once() -> None:
    """1. two pieces are announced, of which the engine takes one; 2. both are announced again; 3. a third is new"""
    pieces = WaitingPieces(10_000)
    assert pieces.add("hub", "a", feed(0, 4_000))
    assert pieces.add("hub", "a", feed(1, 4_000))
    pieces.take("hub", "a", 0, 0)
    before = pieces.bytes_of("hub")
    for number in range(2):
        assert pieces.is_known("a", feed(number, 4_000))
        assert pieces.add("hub", "a", feed(number, 4_000))
    assert pieces.bytes_of("hub") == before
    for unknown in (feed(2, 4_000), feed(0, 4_000, from_stage=3)):
        assert not pieces.is_known("a", unknown)
    assert not pieces.is_known("b", feed(0, 4_000))
    pieces.take("hub", "a", 0, 1)
    assert pieces.bytes_of("hub") == 0


@pytest.mark.attack("P32")
def test_where_there_is_no_room_the_request_with_most_bytes_is_named() -> None:
    pieces = WaitingPieces(10_000)
    assert pieces.add("hub", "small", feed(0, 1_000))
    assert pieces.add("hub", "large", feed(0, 7_000))
    assert not pieces.add("hub", "small", feed(1, 3_000))
    assert pieces.largest_with("hub", "small", feed(1, 3_000)) == "large"
    assert pieces.largest_with("hub", "small", feed(1, 7_000)) == "small"
    assert pieces.largest_with("hub", "new", feed(0, 20_000)) == "new"
    assert pieces.largest_with("other", "new", feed(0, 0)) == "new"
    pieces.take("hub", "large", 0, 0)
    assert pieces.largest_with("hub", "new", feed(0, 0)) == "small"


def test_pieces_that_were_taken_or_whose_request_has_ended_make_room() -> None:
    pieces = WaitingPieces(20_000)
    for number in range(3):
        assert pieces.add("hub", "a", feed(number, 4_000))
    assert pieces.add("hub", "a", feed(0, 4_000, from_stage=3))
    full = pieces.bytes_of("hub")
    pieces.take("hub", "a", 0, 1)
    assert 0 < pieces.bytes_of("hub") < full - 8_000
    pieces.take("hub", "unknown", 0, 1)
    pieces.forget_request("hub", "a")
    pieces.forget_request("hub", "a")
    assert pieces.bytes_of("hub") == 0


@pytest.mark.attack("P32")
def test_many_small_values_take_more_than_their_bytes() -> None:
    ref = wire.PayloadRef(from_stage=0, to_stage=1, key="k", connector="c", size_bytes=0, metadata={"a": [0] * 1_000})
    pieces = WaitingPieces(10_000)
    assert not pieces.add(
        "hub", "a", wire.Feed(epoch=1, request_id="a", attempt=0, from_stage=0, number=0, payload=ref)
    )


def test_the_engine_frees_the_pieces_that_it_has_and_no_later_one() -> None:
    pieces = WaitingPieces(100_000)
    for number in range(3):
        assert pieces.add("hub", "a", feed(number, 4_000))
    whole = pieces.bytes_of("hub")
    pieces.take("hub", "a", 0, 1)
    assert pieces.bytes_of("hub") == whole // 3
    assert pieces.has_any("a")


def test_nothing_is_kept_of_a_hub_whose_pieces_were_all_taken() -> None:
    pieces = WaitingPieces(100_000)
    assert pieces.add("hub", "a", feed(0, 10))
    assert pieces.add("other", "b", feed(0, 10))
    pieces.take("hub", "a", 0, 0)
    pieces.forget_request("hub", "a")
    assert list(pieces._of_hub) == list(pieces._of_requests) == ["other"]
    assert list(pieces._announced) == ["b"]


def test_of_two_requests_the_larger_is_named_by_a_byte_and_of_equals_the_one_whose_piece_comes() -> None:
    pieces = WaitingPieces(10_000)
    assert pieces.add("hub", "a", feed(0, 1_000))
    named = [pieces.largest_with("hub", "b", feed(0, size_bytes)) for size_bytes in (999, 1_000, 1_001)]
    assert named == ["a", "b", "b"]
