"""What a request may say of its tokens."""

from __future__ import annotations

from typing import Any

import pytest

from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.token_choices import MAX_ALLOWED_TOKENS, MAX_BAD_WORDS, check_token_choices


@pytest.mark.attack("L4")
@pytest.mark.parametrize(
    ("params", "answers", "said"),
    [
        ({"bad_words": ["a" * 256] * 17}, 1, "4352 characters, where a request may have 4096 in all; give fewer words"),
        ({"bad_words": ["a" * 257]}, 16, "257 characters for each of 16 answers, .* or ask for fewer answers"),
        ({"allowed_token_ids": [7] * (MAX_ALLOWED_TOKENS + 1)}, 1, "name each once"),
    ],
)
def test_words_and_tokens_that_cost_too_much_are_refused(params: dict[str, Any], answers: int, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        check_token_choices(params, answers)


@pytest.mark.parametrize(
    "params",
    [
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
