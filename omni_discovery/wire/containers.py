"""How many maps, arrays and texts a head frame of msgpack holds, counted before it is decoded. Pure.

Each costs far more memory and time than its bytes: four million empty maps are 4 MB in a frame and 300 MB decoded.
"""

from __future__ import annotations

import re
from typing import Final

#: Maps, arrays, texts and byte strings of one head frame of a replica, where most are maps and arrays. The most that a
#: replica has to say at once are the log probabilities of 1024 places: 22 at each, with their texts, are 45 056.
MAX_CONTAINERS: Final = 1 << 16

#: First bytes of maps and arrays; all of them may be parts of texts and numbers, too.
_FIRST_BYTES: Final = bytes([*range(0x80, 0xA0), *range(0xDC, 0xE0)])
#: Numbers and constants, as many as there are one after the other.
_NUMBERS: Final = re.compile(
    rb"(?:[\x00-\x7f\xc0-\xc3\xe0-\xff]++|[\xcd\xd1].{2}|[\xca\xce\xd2].{4}|[\xcb\xcf\xd3].{8}|[\xcc\xd0].)*+",
    re.DOTALL,
)
#: Texts, byte strings and extensions: how many bytes say their length, and how many stand between it and the content.
_WITH_LENGTH: Final = {
    0xD9: (1, 0),
    0xDA: (2, 0),
    0xDB: (4, 0),
    0xC4: (1, 0),
    0xC5: (2, 0),
    0xC6: (4, 0),
    0xC7: (1, 1),
    0xC8: (2, 1),
    0xC9: (4, 1),
}
#: The others that are more than their first byte, with all their bytes: extensions, heads of maps and arrays, and short
#: texts.
_SIZES: Final = {
    0xD4: 3,
    0xD5: 4,
    0xD6: 6,
    0xD7: 10,
    0xD8: 18,
    0xDC: 3,
    0xDD: 5,
    0xDE: 3,
    0xDF: 5,
    **{0xA0 | length: 1 + length for length in range(32)},
}


def has_too_many_containers(packed: bytes, most: int = MAX_CONTAINERS) -> bool:
    """Whether msgpack has more than ``most`` maps, arrays and texts; texts are counted where it has many maps.

    Whatever else is wrong with it is not seen.
    """
    if len(packed) <= most:
        return False
    # One pass in C. Nearly all large heads are texts, tokens or stored bytes, and pass.
    if len(packed) - len(packed.translate(None, _FIRST_BYTES)) <= most:
        return False
    found = at = 0
    while found <= most:
        numbers = _NUMBERS.match(packed, at)
        at = numbers.end() if numbers is not None else at
        if at >= len(packed):
            return False
        first = packed[at]
        found += 1
        if first in _WITH_LENGTH:
            length_bytes, between = _WITH_LENGTH[first]
            begin = at + 1 + length_bytes
            at = begin + between + int.from_bytes(packed[at + 1 : begin], "big")
        else:
            at += _SIZES.get(first, 1)
    return True
