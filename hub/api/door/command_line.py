"""API keys in a command line, which every user of the machine can read: how they are taken out of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_FLAGS: Final = ("--api-key", "--api_key")


def without_keys(words: Sequence[str]) -> list[str]:
    """The words of a command without ``--api-key`` and its values; those behind ``--`` stay."""
    left: list[str] = []
    takes_values = False
    for number, word in enumerate(words):
        if word == "--":
            return [*left, *words[number:]]
        if word in _FLAGS:
            takes_values = True
        elif word.startswith("-"):
            takes_values = False
            left += [] if word.startswith(tuple(f"{flag}=" for flag in _FLAGS)) else [word]
        elif not takes_values:
            left.append(word)
    return left


def shows_key(words: Sequence[str]) -> bool:
    """Whether a command line holds an API key."""
    return without_keys(words) != list(words)
