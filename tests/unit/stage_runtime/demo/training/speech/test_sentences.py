"""What is said to an answer of the thinker."""

from __future__ import annotations

import random

import pytest

from stage_runtime.demo.training.questions import REFUSAL, Operation, is_held_out
from stage_runtime.demo.training.speech.sentences import (
    WORDS,
    all_spoken,
    any_answer,
    held_out_sums,
    number_words,
    spoken,
)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("12 + 30 = 42", "the answer is forty two"),
        ("9 - 3 = 6", "the answer is six"),
        ("45 + 45 = 90", "the answer is ninety"),
        ("Here is 17", "here is seventeen"),
    ],
)
def test_a_sum_is_read_by_its_result_and_a_number_as_it_is(answer: str, said: str) -> None:
    assert " ".join(spoken(answer)) == said


@pytest.mark.parametrize("answer", [REFUSAL, "", "12 + 30", "1 + 1 = 200"])
def test_nothing_is_said_to_anything_else(answer: str) -> None:
    with pytest.raises(ValueError, match="nothing is said"):
        spoken(answer)


def test_every_number_has_words_of_its_own() -> None:
    assert len({number_words(number) for number in range(100)}) == 100
    assert {word for words in all_spoken() for word in words} == set(WORDS)
    assert len(set(all_spoken())) == 200


def test_no_operands_that_are_held_out_are_learnt_from() -> None:
    held_out = {answer.text for answer in held_out_sums()}
    assert len(held_out) > 1000
    rng = random.Random(3)
    for answer in (any_answer(rng) for _ in range(2000)):
        if "=" in answer.text:
            first, sign, second = answer.text.split()[:3]
            assert not is_held_out(int(first), Operation(sign), int(second))
