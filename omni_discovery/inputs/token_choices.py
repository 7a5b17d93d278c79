"""What a request may say of the tokens that its answers are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from omni_discovery.errors import InvalidRequestError

#: Characters of all bad words, for all answers together: each answer turns them into tokens in the engine's thread.
MAX_BAD_WORDS: Final = 4096
#: More than any vocabulary has.
MAX_ALLOWED_TOKENS: Final = 1 << 18
#: The longest pattern that ``repetition_detection`` may look for, and its tokens times how often it has to come. vLLM
#: compares them in Python, in the engine's step, for each token of each answer: 16 answers lose some 10 ms a step.
MAX_PATTERN_TOKENS: Final = 128
MAX_COMPARED_TOKENS: Final = 2048


def check_token_choices(params: Mapping[str, Any], answers: int = 1) -> None:
    """Raise InvalidRequestError if ``bad_words`` of so many answers, ``allowed_token_ids`` or ``repetition_detection``
    cost too much.
    """
    words, allowed = params.get("bad_words"), params.get("allowed_token_ids")
    size = sum(len(each) for each in words if isinstance(each, str)) if isinstance(words, list | tuple) else 0
    if size * answers > MAX_BAD_WORDS:
        each = f" for each of {answers} answers" if answers > 1 else ""
        raise InvalidRequestError(
            f"bad_words: {size} characters{each}, where a request may have {MAX_BAD_WORDS} in all; give fewer words"
            + (", or ask for fewer answers" if answers > 1 else "")
        )
    if isinstance(allowed, list | tuple) and len(allowed) > MAX_ALLOWED_TOKENS:
        raise InvalidRequestError(
            f"allowed_token_ids: {len(allowed)}, where a request may have {MAX_ALLOWED_TOKENS}; name each once"
        )
    repetition = params.get("repetition_detection")
    if isinstance(repetition, Mapping):
        _check_repetition(repetition)


def _check_repetition(asked: Mapping[str, Any]) -> None:
    # Of other types the engine says that they are wrong.
    size, count = (
        value if isinstance(value := asked.get(name), int) else 0 for name in ("max_pattern_size", "min_count")
    )
    if size > MAX_PATTERN_TOKENS or size * count > MAX_COMPARED_TOKENS:
        raise InvalidRequestError(
            f"repetition_detection: 'max_pattern_size' may be {MAX_PATTERN_TOKENS}, and times 'min_count' it may be "
            f"{MAX_COMPARED_TOKENS}; look for a shorter pattern, or for one that comes fewer times"
        )
