"""What a request may say of the tokens that its answers are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from omni_discovery.errors import InvalidRequestError

#: Characters of all bad words, for all answers together: each answer turns them into tokens in the engine's thread.
MAX_BAD_WORDS: Final = 4096
#: Allowed tokens of all answers together, more than any vocabulary has: each answer makes a mask of its own of them.
MAX_ALLOWED_TOKENS: Final = 1 << 18
#: Tokens of ``logit_bias``, of all answers together. Whenever a request joins or leaves a batch, vLLM makes lists of
#: those of all its requests anew: of 256 requests with so many each, that is a quarter of a million.
MAX_BIASED_TOKENS: Final = 1024
#: The longest pattern that ``repetition_detection`` may look for, and its tokens times how often it has to come. vLLM
#: compares them in Python, in the engine's step, for each token of each answer: 16 answers lose some 10 ms a step.
MAX_PATTERN_TOKENS: Final = 128
MAX_COMPARED_TOKENS: Final = 2048
#: Values in ``extra_args``, of all answers together: vLLM copies them for each, in the engine's thread.
MAX_EXTRA_VALUES: Final = 4096
_CHOICES: Final = ("bad_words", "allowed_token_ids", "logit_bias", "repetition_detection", "extra_args")


def check_token_choices(params: Mapping[str, Any], answers: int = 1) -> None:
    """Raise InvalidRequestError if what so many answers are asked for about tokens costs too much: ``bad_words``,
    ``allowed_token_ids``, ``logit_bias``, ``repetition_detection`` or ``extra_args``.
    """
    if params.keys().isdisjoint(_CHOICES):
        return
    # Of other types the engine says that they are wrong.
    words, allowed, biases = params.get("bad_words"), params.get("allowed_token_ids"), params.get("logit_bias")
    characters = sum(len(each) for each in words if isinstance(each, str)) if isinstance(words, list | tuple) else 0
    _check_all("bad_words", f"{characters} characters", characters, MAX_BAD_WORDS, answers)
    tokens = len(allowed) if isinstance(allowed, list | tuple) else 0
    _check_all("allowed_token_ids", f"{tokens} tokens", tokens, MAX_ALLOWED_TOKENS, answers)
    biased = len(biases) if isinstance(biases, Mapping) else 0
    _check_all("logit_bias", f"{biased} tokens", biased, MAX_BIASED_TOKENS, answers)
    extras = params.get("extra_args")
    values = _values_in(extras) if isinstance(extras, Mapping) else 0
    _check_all("extra_args", f"{values} values", values, MAX_EXTRA_VALUES, answers)
    repetition = params.get("repetition_detection")
    if isinstance(repetition, Mapping):
        _check_repetition(repetition)


def _values_in(extras: Mapping[str, Any]) -> int:
    return sum(len(each) if isinstance(each, list | tuple | Mapping) else 1 for each in extras.values())


def _check_all(name: str, given: str, size: int, most: int, answers: int) -> None:
    if size * answers > most:
        each = f" for each of {answers} answers" if answers > 1 else ""
        raise InvalidRequestError(
            f"{name}: {given}{each}, where a request may have {most} in all; give fewer"
            + (", or ask for fewer answers" if answers > 1 else "")
        )


def _check_repetition(asked: Mapping[str, Any]) -> None:
    size, count = (
        value if isinstance(value := asked.get(name), int) else 0 for name in ("max_pattern_size", "min_count")
    )
    if size > MAX_PATTERN_TOKENS or size * count > MAX_COMPARED_TOKENS:
        raise InvalidRequestError(
            f"repetition_detection: 'max_pattern_size' may be {MAX_PATTERN_TOKENS}, and times 'min_count' it may be "
            f"{MAX_COMPARED_TOKENS}; look for a shorter pattern, or for one that comes fewer times"
        )
