"""Where each part of msgpack ends, told without decoding it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from omni_discovery.wire.scan import after_numbers, after_part, after_scalars

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
