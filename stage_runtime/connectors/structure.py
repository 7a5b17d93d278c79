"""How much there is to build in a hand-off's structure, counted before it is decoded: each list costs far more than
its byte. Pure.

A list of numbers, such as token ids, is one container. Tensors, and what is in long texts and bytes, cost nothing here.
"""

from __future__ import annotations

import re
from typing import Final

from stage_runtime.config import SerializationError

#: Lists, mappings, tensors, and texts and bytes of 32 bytes or more.
MAX_PARTS: Final = 100_000
#: All of the structure but what is in the long texts and bytes: more than a million token ids.
MAX_STRUCTURE_BYTES: Final = 8 << 20

#: The first bytes of parts: of small and of long mappings and lists, of bytes and extensions, and of long texts.
_FIRST_OF_PARTS: Final = bytes([*range(0x80, 0xA0), *range(0xC4, 0xCA), *range(0xD4, 0xE0)])
_OTHERS: Final = bytes(set(range(256)) - set(_FIRST_OF_PARTS))
#: Of the longest number or short text.
_LONGEST_SCALAR: Final = 64
#: The bytes behind the first one of numbers.
_SIZES: Final = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8, 0xCA: 4, 0xCB: 8}


def _scalars() -> re.Pattern[bytes]:
    """As many numbers, constants and short texts as follow one another."""
    sized = (_escaped(first) + _any(size) for first, size in _SIZES.items())
    texts = (_escaped(0xA0 | size) + _any(size) for size in range(32))
    choices = b"|".join([b"[\x00-\x7f\xe0-\xff\xc0\xc2\xc3]++", *sized, *texts])
    return re.compile(b"(?:" + choices + b")*+", re.DOTALL)


def _escaped(byte: int) -> bytes:
    return b"\\x%02x" % byte


def _any(size: int) -> bytes:
    return b".{%d}" % size


_SCALARS: Final = _scalars()
#: Of parts with content: how many bytes their length has, and the bytes between it and the content.
_LENGTHS: Final = {
    0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0),
    0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1), 0xD4: (0, 2), 0xD5: (0, 3), 0xD6: (0, 5), 0xD7: (0, 9), 0xD8: (0, 17),
}  # fmt: skip
#: Lists and mappings: the bytes of their length.
_OPENINGS: Final = {**dict.fromkeys(range(0x80, 0xA0), 0), 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}


def check_structure(head: bytes | memoryview) -> None:
    """Raise SerializationError if msgpack has more than MAX_PARTS parts, or more than MAX_STRUCTURE_BYTES of others.

    What is no msgpack is left to the decoder, which stops there, too.
    """
    if len(head) <= MAX_PARTS:
        return
    # Most large structures hold token ids, whose bytes are seldom those of parts.
    if len(head) <= MAX_STRUCTURE_BYTES and len(bytes(head).translate(None, _OTHERS)) <= MAX_PARTS:
        return
    _scan(memoryview(head))


def _scan(head: memoryview) -> None:
    parts = others = place = 0
    while place < len(head):
        # A little more than is allowed, so that the last number is never cut.
        end = min(len(head), place + MAX_STRUCTURE_BYTES - others + _LONGEST_SCALAR)
        found = _SCALARS.match(head, place, end)
        stop = place if found is None else found.end()
        others, place = others + stop - place, stop
        if others > MAX_STRUCTURE_BYTES:
            raise SerializationError(
                f"the lists and texts of a hand-off take more than {MAX_STRUCTURE_BYTES} bytes: hand over numpy arrays "
                f"or tensors in their place"
            )
        if place == len(head):
            return
        parts += 1
        if parts > MAX_PARTS:
            raise SerializationError(
                f"a hand-off has more than {MAX_PARTS} lists, mappings, tensors and long texts: hand over fewer and "
                f"larger ones"
            )
        place = _after_part(head, place)


def _after_part(head: memoryview, place: int) -> int:
    """Where a part's content begins, if that are values of their own, or ends; the end of all for what is no part."""
    first = head[place]
    opening = _OPENINGS.get(first)
    if opening is not None:
        return place + 1 + opening
    size, more = _LENGTHS.get(first, (0, len(head)))
    begin = place + 1 + size
    return begin + more + int.from_bytes(head[place + 1 : begin], "big")
