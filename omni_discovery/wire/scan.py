"""Going through msgpack without decoding it: what is to be bounded must be counted before any of it is built. Pure.

Whatever else is wrong with it is left to the decoder, which stops there.
"""

from __future__ import annotations

import re
from typing import Final

#: As many numbers and constants as follow one another.
_NUMBERS: Final = re.compile(
    rb"(?:[\x00-\x7f\xe0-\xff\xc0\xc2\xc3]++|[\xcc\xd0].|[\xcd\xd1].{2}|[\xca\xce\xd2].{4}|[\xcb\xcf\xd3].{8})*+",
    re.DOTALL,
)


def _with_short_texts(numbers: re.Pattern[bytes]) -> re.Pattern[bytes]:
    texts = b"|".join(b"\\x%02x.{%d}" % (0xA0 | size, size) for size in range(32))
    return re.compile(b"(?:" + numbers.pattern.removesuffix(b"*+") + b"|" + texts + b")*+", re.DOTALL)


_SCALARS: Final = _with_short_texts(_NUMBERS)


def _with_short_parts(numbers: re.Pattern[bytes]) -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    """One short part and the numbers behind it; and as many of both as follow one another.

    Short parts are openings of lists and mappings, and whole texts, byte strings and extensions of less than 32 bytes.
    """
    openings = rb"[\x80-\x9f]|[\xdc\xde].{2}|[\xdd\xdf].{4}"
    texts = b"|".join(b"\\x%02x.{%d}" % (0xA0 | size, size) for size in range(32))
    byte_strings = rb"\xc4(?:" + b"|".join(b"\\x%02x.{%d}" % (size, size) for size in range(32)) + b")"
    extensions = rb"\xc7(?:" + b"|".join(b"\\x%02x.{%d}" % (size, size + 1) for size in range(32)) + b")"
    fixed = rb"\xd4.{2}|\xd5.{3}|\xd6.{5}|\xd7.{9}|\xd8.{17}"
    part = b"(?:" + b"|".join([openings, texts, byte_strings, extensions, fixed]) + b")"
    parts = b"(?:" + numbers.pattern.removesuffix(b"*+") + b"|" + part + b")*+"
    return re.compile(part + numbers.pattern, re.DOTALL), re.compile(parts, re.DOTALL)


_SHORT_PART, _SHORT_PARTS = _with_short_parts(_NUMBERS)
#: The first bytes of long parts, and those of short and long ones alike.
_LONG: Final = b"\xd9\xda\xdb\xc5\xc6\xc8\xc9"
_ANY_LENGTH: Final = b"\xc4\xc7"
#: How much of them is looked at together: who only counts up to a bound need not see the rest.
_WINDOW_BYTES: Final = 1 << 18
#: Of parts with content: how many bytes their length has, and the bytes between it and the content.
_LENGTHS: Final = {
    0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0),
    0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1), 0xD4: (0, 2), 0xD5: (0, 3), 0xD6: (0, 5), 0xD7: (0, 9), 0xD8: (0, 17),
    **{0xA0 | size: (0, size) for size in range(32)},
}  # fmt: skip
#: Lists and mappings: the bytes of their length.
_OPENINGS: Final = {**dict.fromkeys(range(0x80, 0xA0), 0), 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
#: The fewest bytes of content that are left to ``after_part``, by how many bytes their length has.
_LEAST: Final = {1: 32, 2: 1 << 8, 4: 1 << 16}


def after_numbers(packed: bytes, place: int) -> int:
    """Where the numbers and constants end that follow one another from a place on."""
    found = _NUMBERS.match(packed, place)
    return place if found is None else found.end()


def after_scalars(packed: memoryview, place: int, end: int) -> int:
    """As ``after_numbers``, of texts of less than 32 bytes as well, and of what ends before ``end``."""
    found = _SCALARS.match(packed, place, end)
    return place if found is None else found.end()


def after_short_parts(packed: bytes, place: int, most: int) -> tuple[int, int]:
    """Where short parts and numbers end that follow one another from a place on, and how many parts those are.

    Counting stops beyond ``most`` parts, and after 256 KiB.
    """
    first = packed[place]
    if first in _LONG or (first in _ANY_LENGTH and packed[place + 1 : place + 2] >= b"\x20"):
        return place, 0
    window = min(len(packed), place + _WINDOW_BYTES)
    numbers = _NUMBERS.match(packed, place, window)
    begin = place if numbers is None else numbers.end()
    found = _SHORT_PARTS.match(packed, begin, window)
    end = begin if found is None else found.end()
    return end, _SHORT_PART.subn(b"", packed[begin:end], most + 1)[1] if begin < end else 0


def after_part(packed: bytes | memoryview, place: int) -> int:
    """Where a part's content begins, if that are values of their own, or ends; the end of all for what is no part."""
    first = packed[place]
    opening = _OPENINGS.get(first)
    if opening is not None:
        return place + 1 + opening
    size, more = _LENGTHS.get(first, (0, len(packed)))
    begin = place + 1 + size
    return begin + more + int.from_bytes(packed[place + 1 : begin], "big")


def is_written_long(packed: bytes, place: int) -> bool:
    """Whether the length of a text, byte string or extension has more bytes than it needs, as no encoder writes it."""
    size = _LENGTHS.get(packed[place], (0, 0))[0]
    length = packed[place + 1 : place + 1 + size]
    return size > 0 and len(length) == size and int.from_bytes(length, "big") < _LEAST[size]
