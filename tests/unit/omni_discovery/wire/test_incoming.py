"""A message of several frames is the same whether it is put together at once or as it comes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_discovery import wire
from omni_discovery.errors import WireError


def came(frames: list[bytes]) -> tuple[list[bytes], int]:
    """The message of these frames, and how many of them were taken."""
    incoming = wire.Incoming(frames[0])
    for number, frame in enumerate(frames[1:], 2):
        if not incoming.add(frame):
            return incoming.frames(), number
    return incoming.frames(), len(frames)


@given(st.lists(st.integers(0, 3 * wire.MAX_FRAME_BYTES), min_size=2, max_size=5))
def test_what_was_cut_is_whole_again(lengths: list[int]) -> None:
    frames = [bytes([number + 1]) * length for number, length in enumerate(lengths)]
    pieces = [bytes(piece) for piece in wire.cut(frames)]
    assert came(pieces) == (frames, len(pieces))


@given(
    st.lists(st.sampled_from([0, 1, 2, wire.MAX_FRAME_BYTES, wire.MAX_FRAME_BYTES + 1]), min_size=1, max_size=4),
    st.lists(st.sampled_from([0, 1, 2, wire.MAX_FRAME_BYTES]), max_size=6),
)
def test_pieces_that_are_not_as_was_said_are_none(lengths: list[int], sizes: list[int]) -> None:
    first, pieces = b"\x02" + msgspec.msgpack.encode(lengths), [bytes(size) for size in sizes]
    try:
        expected = wire.put_together(lengths, pieces)
    except WireError:
        expected = [first]
    assert came([first, *pieces])[0] == expected


@pytest.mark.parametrize("first", [b"\x01head", b"", b"\x02", b"\x02\xc0", b"\x03"])
def test_of_other_messages_one_frame_more_is_kept_than_they_may_have(first: bytes) -> None:
    few = [first] + [b"a"] * wire.MAX_ATTACHMENTS
    assert came(few) == (few, len(few))
    frames, taken = came([first] + [b"a"] * 1000)
    assert len(frames) == taken == wire.MAX_ATTACHMENTS + 2
