"""Where each part of msgpack ends, told without decoding it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from omni_discovery.wire.scan import after_numbers, after_part, after_scalars, after_short_parts, is_written_long

encode = msgspec.msgpack.encode
SMALL, LARGE = [0, 127, -1, -32, 200, -100, 60_000, -30_000, None, True, False], [1 << 31, -(1 << 31), 1 << 63, 0.5]
NUMBERS = [*SMALL, *LARGE, -(1 << 63)]


def test_numbers_and_constants_are_passed_and_short_texts_only_where_asked_for() -> None:
    numbers = b"".join(map(encode, NUMBERS)) + b"\xca\x00\x00\x00\x00"
    texts = b"".join(encode("\x7f" * size) for size in range(32))
    packed = numbers + texts + numbers + b"\x90"
    assert after_numbers(packed, 0) == len(numbers)
    assert after_scalars(memoryview(packed), 0, len(packed)) == len(packed) - 1
    assert after_scalars(memoryview(packed), 0, len(numbers) + 1) == len(numbers) + 1
    assert after_numbers(packed, len(packed) - 1) == len(packed) - 1


@pytest.mark.parametrize(
    "value",
    [
        *("\x7f" * size for size in (0, 1, 31, 32, 255, 256, 70_000)),
        *(b"\x90" * size for size in (0, 255, 256, 70_000)),
        *(msgspec.msgpack.Ext(7, b"\x80" * size) for size in (0, 1, 2, 3, 4, 8, 16, 17, 256, 70_000)),
    ],
)
def test_what_has_content_ends_behind_it(value: Any) -> None:
    packed = encode(value)
    for given in (packed, memoryview(packed)):
        assert after_part(given, 0) == len(packed)


@pytest.mark.parametrize("count", [0, 15, 16, 70_000])
def test_a_list_or_mapping_goes_on_with_its_values(count: int) -> None:
    lists, mappings = encode([1] * count), encode(dict.fromkeys(range(count), 1))
    assert after_part(lists, 0) == len(lists) - count
    assert mappings[after_part(mappings, 0) :][:2] == b"\x00\x01"[: 2 * count]


def test_what_is_no_part_ends_it_all() -> None:
    assert after_part(b"\xc1\x00\x00", 0) >= 3


SHORT = [
    *("\x80" * size for size in (0, 1, 15)),
    *(b"\x90" * size for size in (0, 1, 31)),
    *(msgspec.msgpack.Ext(7, b"\x80" * size) for size in (0, 1, 2, 3, 4, 8, 16, 17, 31)),
    [],
    [1] * 15,
    [1] * 16,
    [1] * 70_000,
    {},
    dict.fromkeys(range(16), 1),
    dict.fromkeys(range(70_000), 1),
]


@pytest.mark.parametrize("value", SHORT)
def test_short_parts_are_counted_and_passed_with_the_numbers_around_them(value: Any) -> None:
    numbers = b"".join(map(encode, NUMBERS))
    packed = numbers + encode(value) + numbers + encode(value) + b"\xd9\x20" + b"\x80" * 32
    place = found = 0
    while place < len(packed) - 34:
        place, count = after_short_parts(packed, place, 10)
        found += count
    assert (place, found) == (len(packed) - 34, 2)
    assert after_short_parts(packed, place, 10) == (place, 0)


def test_counting_stops_beyond_the_bound_and_goes_on_where_it_was_cut() -> None:
    packed = b"\xd4\x01\x80" * 200_000
    end, count = after_short_parts(packed, 0, 100)
    assert (end % 3, count) == (0, 101)
    assert 0 < end < len(packed)


@pytest.mark.parametrize(
    ("packed", "is_long"),
    [
        (b"\xd9\x1f", True), (b"\xd9\x20", False), (b"\xda\x00\xff", True), (b"\xda\x01\x00", False),
        (b"\xdb\x00\x00\xff\xff", True), (b"\xdb\x00\x01\x00\x00", False), (b"\xc5\x00\x00", True),
        (b"\xc6\x00", False), (b"\xd9", False), (b"\x80", False), (b"\xd4\x01\x00", False),
        (b"\xc8\x01\x00\x01", False),
    ],
)  # fmt: skip
def test_a_length_of_more_bytes_than_it_needs_is_seen(packed: bytes, is_long: bool) -> None:
    assert is_written_long(packed, 0) is is_long
