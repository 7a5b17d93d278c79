"""What is held of a request while its hub is behind: joined where nothing is lost by that, and bounded."""

from __future__ import annotations

import pytest

from stage_runtime.engine_loop.jobs import OutputChunk
from stage_runtime.server.held_output import HeldOutput


def word(number: int) -> OutputChunk:
    return OutputChunk("a", "text", text=f"w{number} ", token_ids=(number, number + 1))


def test_words_and_their_tokens_leave_as_one_in_order() -> None:
    held = HeldOutput()
    assert not held
    assert held.take() is None
    assert all(held.add(word(number)) for number in range(3))
    assert held
    assert held.take() == OutputChunk("a", "text", text="w0 w1 w2 ", token_ids=(0, 1, 1, 2, 2, 3))
    assert held.take() is None
    assert held.add(word(7))
    assert held.take() == word(7)


@pytest.mark.parametrize(
    "chunk",
    [
        OutputChunk("a", "image", mime="image/png", attachment=b"png"),
        OutputChunk("a", "text", text="x", token_ids=(1,), logprobs=(((1, -0.5, 1, "x"),),)),  # type: ignore[arg-type]
        OutputChunk("a", "text", prompt_token_ids=(1,), token_ids=(1,)),
        OutputChunk("a", "audio", token_ids=(1,)),
        OutputChunk("a", "text", text="no tokens"),
        OutputChunk("a", "text", text="x" * 40_000, token_ids=(1,)),
    ],
)
def test_what_is_more_than_text_or_of_another_kind_is_not_joined_to_it(chunk: OutputChunk) -> None:
    held = HeldOutput()
    assert held.add(word(1))
    assert not held.add(chunk)
    assert held.take() == word(1)


def test_what_is_held_is_bounded() -> None:
    held = HeldOutput()
    count = 0
    while held.add(word(count)):
        count += 1
        assert count <= 1024
    assert count == 1024
    assert held.take() is not None
    assert sum(held.add(OutputChunk("a", "text", text="x" * 10_000)) for _ in range(10)) == 3


def test_of_the_longest_text_nothing_is_left_out() -> None:
    held = HeldOutput()
    assert held.add(OutputChunk("a", "text", text="x" * (32 << 10), token_ids=(1,)))
    assert not held.add(OutputChunk("a", "text", text="y", token_ids=(1,)))


def test_two_chunks_are_joined_as_any_number_is() -> None:
    held = HeldOutput()
    assert held.take() is None
    first, second = word(1), word(2)
    assert held.add(first)
    assert held.add(second)
    assert held.take() == OutputChunk("a", "text", text="w1 w2 ", token_ids=(1, 2, 2, 3))
    assert not held
