"""How much memory a text of JSON takes with what is made of it. Pure."""

from __future__ import annotations

from typing import Final

#: What a value in a list or a mapping takes, and a list or a mapping itself.
_VALUE_BYTES: Final = 40
_PART_BYTES: Final = 200


def memory_of(body: str | bytes) -> int:
    """The memory of a text of JSON and of what is made of it, in bytes, about."""
    text = body.encode(errors="replace") if isinstance(body, str) else body
    return len(text) + _VALUE_BYTES * text.count(b",") + _PART_BYTES * (text.count(b"{") + text.count(b"["))
