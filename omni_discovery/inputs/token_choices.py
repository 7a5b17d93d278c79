"""What a request may say of the tokens that its answers are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from omni_discovery.errors import InvalidRequestError

#: Characters of all bad words, for all answers together: each answer turns them into tokens in the engine's thread.
MAX_BAD_WORDS: Final = 4096
#: More than any vocabulary has.
MAX_ALLOWED_TOKENS: Final = 1 << 18


def check_token_choices(params: Mapping[str, Any], answers: int = 1) -> None:
    """Raise InvalidRequestError if ``bad_words`` of so many answers, or ``allowed_token_ids``, cost too much."""
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
