"""How much memory texts of JSON take with what is made of them, and values that were. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

#: What a value in a list or a mapping takes, and a list or a mapping itself.
_VALUE_BYTES: Final = 40
_PART_BYTES: Final = 200
_TEXTS: Final = frozenset((str, bytes, bytearray))
_ROWS: Final = frozenset((list, tuple))
_SCALARS: Final = frozenset((int, float, bool, type(None)))


def memory_of(body: str | bytes) -> int:
    """The memory of a text of JSON and of what is made of it, in bytes, about."""
    text = body.encode(errors="replace") if isinstance(body, str) else body
    return len(text) + _VALUE_BYTES * text.count(b",") + _PART_BYTES * (text.count(b"{") + text.count(b"["))


def memory_of_value(value: Any, most_bytes: int) -> int:
    """The memory of a value as JSON has them, in bytes, about; beyond ``most_bytes`` no more is counted."""
    size_bytes, left = 0, [value]
    while left and size_bytes <= most_bytes:
        each = left.pop()
        kind = type(each)
        if kind in _TEXTS:
            size_bytes += sys.getsizeof(each)
        elif kind in _ROWS:
            size_bytes += _PART_BYTES + _VALUE_BYTES * len(each)
            if not _SCALARS.issuperset(map(type, each)):
                left += each
        elif isinstance(each, Mapping):
            size_bytes += _PART_BYTES + _VALUE_BYTES * len(each)
            left += [*each.keys(), *each.values()]
    return size_bytes
