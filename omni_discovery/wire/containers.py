"""How many maps, arrays and texts a head frame of msgpack holds, counted before it is decoded. Pure.

Each costs far more memory and time than its bytes: four million empty maps are 4 MB in a frame and 300 MB decoded.
"""

from __future__ import annotations

from typing import Final

from omni_discovery.wire.scan import after_part, after_short_parts, is_written_long

#: Maps, arrays, texts and byte strings of one head frame of a replica, where most are maps and arrays. The most that a
#: replica has to say at once are the log probabilities of 1024 places: 22 at each, with their texts, are 45 056.
MAX_CONTAINERS: Final = 1 << 16
#: As many of a hub's head, and of all heads as they are encoded: 50 000 lists and objects of a body, with their texts.
MAX_CONTAINERS_TO_REPLICA: Final = 1 << 18

#: First bytes of maps and arrays; all of them may be parts of texts and numbers, too.
_FIRST_BYTES: Final = bytes([*range(0x80, 0xA0), *range(0xDC, 0xE0)])


def has_too_many_containers(packed: bytes, most: int = MAX_CONTAINERS) -> bool:
    """Whether msgpack has more than ``most`` maps, arrays and texts; texts are counted where it has many maps.

    Whatever else is wrong with it is not seen.
    """
    if len(packed) <= most:
        return False
    # One pass in C. Nearly all large heads are texts, tokens or stored bytes, and pass.
    if len(packed) - len(packed.translate(None, _FIRST_BYTES)) <= most:
        return False
    found = place = 0
    while place < len(packed) and found <= most:
        end, count = after_short_parts(packed, place, most - found)
        if end == place:
            # A long one. With needlessly long lengths, short ones would cost more to count than to decode.
            if is_written_long(packed, place):
                return True
            end, count = after_part(packed, place), 1
        place, found = end, found + count
    return found > most
