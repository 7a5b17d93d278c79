"""What a request may say of its tokens."""

from __future__ import annotations

from typing import Any

import pytest

from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.token_choices import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_COMPARED_TOKENS,
    MAX_PATTERN_TOKENS,
    check_token_choices,
)
from stage_runtime.engines.sampling import token_sampling


@pytest.mark.attack("L4")
@pytest.mark.parametrize(
    ("params", "answers", "said"),
    [
        ({"bad_words": ["a" * 256] * 17}, 1, "4352 characters, where a request may have 4096 in all; give fewer"),
        ({"bad_words": ["a" * 257]}, 16, "257 characters for each of 16 answers, .* or ask for fewer answers"),
        ({"allowed_token_ids": [7] * (MAX_ALLOWED_TOKENS + 1)}, 1, "262145 tokens, where"),
    ],
)
def test_words_and_tokens_that_cost_too_much_are_refused(params: dict[str, Any], answers: int, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        check_token_choices(params, answers)


@pytest.mark.attack("P21")
@pytest.mark.parametrize(
    ("params", "answers", "said"),
    [
        (
            {"logit_bias": dict.fromkeys(range(1025), 1.0)},
            1,
            "logit_bias: 1025 tokens, where .* 1024 in all; give fewer$",
        ),
        (
            {"logit_bias": {"7": 1.0, "8": 2.0}},
            513,
            "logit_bias: 2 tokens for each of 513 answers, .* ask for fewer answers",
        ),
        ({"allowed_token_ids": [7] * (MAX_ALLOWED_TOKENS // 16 + 1)}, 16, "16385 tokens for each of 16 answers"),
    ],
)
def test_tokens_count_for_each_answer(params: dict[str, Any], answers: int, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        check_token_choices(params, answers)
    check_token_choices(
        {name: value[:5] if isinstance(value, list) else {7: 1.0} for name, value in params.items()}, answers
    )


@pytest.mark.attack("O1")
@pytest.mark.parametrize(
    ("size", "count"), [(MAX_PATTERN_TOKENS + 1, 2), (1 << 30, 2), (MAX_PATTERN_TOKENS, 17), (1, 2049), (1, 1 << 30)]
)
def test_patterns_that_take_long_to_look_for_are_refused(size: int, count: int) -> None:
    """The engine's step compares the answer's tokens in Python: minutes a step, for patterns of any length."""
    with pytest.raises(InvalidRequestError, match="'max_pattern_size' may be 128"):
        check_token_choices({"repetition_detection": {"max_pattern_size": size, "min_count": count}})


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_detection": {"max_pattern_size": MAX_PATTERN_TOKENS, "min_pattern_size": 9, "min_count": 16}},
        {"repetition_detection": {"max_pattern_size": 1, "min_count": MAX_COMPARED_TOKENS}},
        # The engine refuses these by their types.
        {"repetition_detection": {"max_pattern_size": "9", "min_count": [7]}},
        {"repetition_detection": 7},
        {"bad_words": ["a" * (MAX_BAD_WORDS // 16)], "allowed_token_ids": list(range(9))},
        {"bad_words": None, "allowed_token_ids": None},
        # The engine refuses these by their types.
        {"bad_words": "a" * 9999, "allowed_token_ids": 7},
        {"bad_words": [7, None]},
        {},
    ],
)
def test_usual_words_and_tokens_are_fine(params: dict[str, Any]) -> None:
    check_token_choices(params, 16)


@pytest.mark.attack("Y8")
@pytest.mark.parametrize(
    ("extras", "answers", "said"),
    [
        ({"a": [1] * 4097}, 1, "extra_args: 4097 values, where a request may have 4096 in all"),
        ({"a": [1] * 200, "b": ["x"] * 56, "c": 1}, 16, "257 values for each of 16 answers"),
    ],
)
def test_extra_arguments_are_few(extras: dict[str, Any], answers: int, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        check_token_choices({"extra_args": extras}, answers)
    check_token_choices({"extra_args": dict.fromkeys(extras, 1)}, answers)


@pytest.mark.attack("Y8")
def test_a_stage_refuses_too_many_of_them_before_it_reads_them() -> None:
    with pytest.raises(InvalidRequestError, match="extra_args: 1000000 values"):
        token_sampling({"extra_args": {"a": [1] * 1_000_000}})
