"""What the torch engine is told to call to learn what its process was given. Imports no torch."""

from __future__ import annotations

import os

import msgspec


class Name(msgspec.Struct):
    """The name of a variable."""

    prompt: str


def variable(name: Name) -> str:
    """Says the variable's value in this process."""
    return os.environ.get(name.prompt, "not set")
