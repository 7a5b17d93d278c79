"""How often the text of an answer with tools goes on, as parsers of calls read all of it anew each time."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hub.api.vllm.bounds.pacing import TextPace, may_pace


def readings(length: int, piece: int, piece_s: float) -> list[int]:
    """How much text a parser reads, each time that some goes on."""
    pace = TextPace()
    return [(number + 1) * piece for number in range(length // piece) if pace.is_due(piece, number * piece_s)]


def test_a_short_text_goes_on_as_it_comes() -> None:
    assert len(readings(4096, 3, 0.0)) == 4096 // 3


@pytest.mark.attack("Q64")
@pytest.mark.parametrize("length", [60_000, 1_000_000])
def test_all_readings_of_a_long_text_together_cost_a_bounded_number_of_times_the_text(length: int) -> None:
    """By every three characters, a text of 60 000 would be read 10 000 times as a half: 600 million characters."""
    read = readings(length, 3, 0.0)
    of_begin = 4096 // 3 * 4096
    assert sum(read) < of_begin + 40 * length
    assert read[-1] > length * 0.95


@pytest.mark.attack("Q64")
def test_no_text_waits_for_longer_than_a_second() -> None:
    """Twenty pieces a second, of a text that has a million characters already."""
    pace = TextPace()
    pace.is_due(1_000_000, 0.0)
    gone = [number * 0.05 for number in range(1, 401) if pace.is_due(4, number * 0.05)]
    assert gone[0] == pytest.approx(1.0)
    assert max(later - earlier for earlier, later in pairwise(gone)) <= 1.06


@pytest.mark.parametrize("parser", ["llama3_json", "deepseek_v3", "jamba", "a-plugin", "", None])
def test_a_parser_that_may_tell_of_one_call_a_piece_gets_pieces_as_they_come(parser: str | None) -> None:
    assert not may_pace(parser)
    assert may_pace("hermes")
