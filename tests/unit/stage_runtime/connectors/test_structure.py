"""What a hand-off may hold in lists and mappings, counted before any of it is built."""

from __future__ import annotations

import random
import struct
import time
from typing import Any

import msgspec
import pytest

from stage_runtime.config import SerializationError
from stage_runtime.connectors.serialization import deserialize, serialize
from stage_runtime.connectors.structure import MAX_PARTS, MAX_STRUCTURE_BYTES, check_structure

encode = msgspec.msgpack.encode
MILLIONS = 2_000_000


def array(count: int, item: bytes) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big") + item * count


def handoff(body: bytes, lengths: bytes = b"\x90") -> bytes:
    head = b"\x92" + lengths + body
    return struct.pack("<8sQ", b"OMNIPAY1", len(head)) + head


@pytest.mark.attack("K2")
@pytest.mark.parametrize(
    "body",
    [
        array(MILLIONS, b"\x80"),
        array(MILLIONS, b"\x90"),
        array(MILLIONS, b"\xdc\x00\x00"),
        array(MILLIONS, b"\xdf\x00\x00\x00\x00"),
        array(MILLIONS, b"\xd9\x00"),
        array(MILLIONS, b"\xc4\x00"),
        array(MILLIONS, b"\xd4\x01\x00"),
        b"\x91" * MILLIONS,
        b"\x81\xa1x" * MILLIONS,
        array(6_000_000, b"\xa1x"),
        array(10_000_000, b"\x01"),
    ],
    ids=[
        "mappings",
        "lists",
        "lists of 16 bits",
        "mappings of 32 bits",
        "texts",
        "bytes",
        "extensions",
        "nested lists",
        "nested mappings",
        "short texts",
        "numbers",
    ],
)
def test_a_hand_off_of_millions_of_parts_is_refused_before_it_is_decoded(body: bytes) -> None:
    with pytest.raises(SerializationError, match=r"lists, mappings, tensors and long texts|take more than"):
        deserialize(handoff(body))


@pytest.mark.attack("K2")
def test_tensors_and_dimensions_without_number_are_refused() -> None:
    with pytest.raises(SerializationError):
        deserialize(handoff(b"\xc0", array(MILLIONS, b"\x00")))
    place = encode(["float32", [0] * MILLIONS, 0])
    with pytest.raises(SerializationError):
        deserialize(handoff(encode(msgspec.msgpack.Ext(1, place)), b"\x91\x00"))


@pytest.mark.parametrize(
    "value",
    [
        {"token_ids": [random.Random(1).randrange(150_000) for _ in range(1_000_000)]},
        {"text": "\x80" * 3_000_000, "bytes": bytes([0x80]) * 30_000_000},
        {"hidden": [0.5] * 500_000, "numbers": [-1, 1 << 40, -(1 << 40), 200, -200, 70_000, None, True] * 10_000},
        {"texts": ["x" * length for length in range(400)] * 100},
        {"rows": [{"a": [1, 2], "b": "c"} for _ in range(40_000)]},
    ],
    ids=["token ids", "text and bytes", "numbers", "texts", "rows"],
)
def test_what_stages_hand_over_passes(value: Any) -> None:
    assert deserialize(serialize(value)) == value


def test_the_bounds_are_exact_where_they_are_reached() -> None:
    check_structure(encode([[]] * (MAX_PARTS - 1)))
    with pytest.raises(SerializationError, match=f"more than {MAX_PARTS} lists"):
        check_structure(encode([[]] * MAX_PARTS))
    # The bytes of the long text and of the containers do not count.
    numbers = [0] * MAX_STRUCTURE_BYTES
    check_structure(encode([bytes(MAX_STRUCTURE_BYTES), numbers]))
    with pytest.raises(SerializationError, match=f"take more than {MAX_STRUCTURE_BYTES} bytes"):
        check_structure(encode([bytes(MAX_STRUCTURE_BYTES), [*numbers, 0]]))


def test_a_producer_hears_of_it_too() -> None:
    with pytest.raises(SerializationError, match="hand over fewer and larger ones"):
        serialize([{}] * 200_000)
    with pytest.raises(SerializationError, match="hand over numpy arrays or tensors"):
        serialize([0.5] * 1_000_000)


def test_every_number_and_text_is_passed_over_as_a_whole() -> None:
    """A wrong size of one would read its content as parts."""
    like_parts = int.from_bytes(b"\x80" * 8, "big")
    values = [like_parts >> shift for shift in range(0, 64, 8)] + [-(like_parts >> shift) for shift in range(1, 64, 8)]
    values += [struct.unpack(">d", b"\x80" * 8)[0], *("\x9f" * length for length in range(16))]
    floats = array(60_000, b"\xca\x80\x80\x80\x80")
    for body in (encode(values * 3_000), floats):
        assert len(body) > MAX_PARTS
        check_structure(body)
        with pytest.raises(SerializationError):
            check_structure(body + b"\x90" * (MAX_PARTS + 1))


def test_what_is_no_msgpack_ends_the_count() -> None:
    for body in (b"\xc1" * 300_000, encode([[]] * 90_000 + ["x" * 200_000])[:-100_000] + b"\x80" * 99_999):
        check_structure(body)


@pytest.mark.attack("K2")
def test_the_count_goes_on_in_seconds_whatever_is_in_it() -> None:
    began_s = time.monotonic()
    for body in (array(20_000_000, b"\x80"), array(8_000_000, b"\xcc\x80"), bytes([0x80, 0xD9, 0]) * 5_000_000):
        with pytest.raises(SerializationError):
            check_structure(body)
    assert time.monotonic() - began_s < 30.0
