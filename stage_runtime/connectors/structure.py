"""How much there is to build in a hand-off's structure, counted before it is decoded: each list costs far more than
its byte. Pure.

A list of numbers, such as token ids, is one container. Tensors, and what is in long texts and bytes, cost nothing here.
"""

from __future__ import annotations

from typing import Final

from omni_discovery.wire.scan import after_part, after_scalars
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
        stop = after_scalars(head, place, end)
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
        place = after_part(head, place)
