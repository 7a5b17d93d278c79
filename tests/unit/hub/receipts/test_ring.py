"""The receipts of requests that ended: a bounded number, bounded in bytes; failed ones stay longer."""

from __future__ import annotations

import pytest

from hub.receipts.ring import ReceiptRing, meant

HEX = "0123456789abcdef0123456789abcdef"


def test_the_oldest_make_room_and_failed_ones_are_not_pushed_out_by_others() -> None:
    """1. one fails, then a hundred do not; 2. the failed one and the last ten are there"""
    ring = ReceiptRing(10)
    ring.add(("bad~0", "bad", ""), b"bad", failed=True)
    for number in range(100):
        ring.add((f"r{number}~{number}", f"r{number}", ""), b"%d" % number, failed=False)
    assert [*ring.failed()] == [b"bad"]
    assert [*ring.served()] == [b"%d" % number for number in range(99, 89, -1)]
    assert ring.find("bad", 10) == [b"bad"]
    assert ring.find("r89", 10) == []


def test_of_the_many_requests_with_one_label_those_that_failed_and_the_newest_are_found() -> None:
    ring = ReceiptRing(100)
    for number in range(50):
        ring.add((f"r{number}", "", "nightly"), b"%d" % number, failed=number in {7, 9})
    assert ring.find("nightly", 4) == [b"9", b"7", b"49", b"48"]


def test_a_storm_of_failures_is_bounded_too() -> None:
    ring = ReceiptRing(10)
    for number in range(100):
        ring.add((f"r{number}", "", ""), b"x", failed=True)
    assert len(ring) == 2


def test_few_large_receipts_take_no_more_memory_than_many_small_ones() -> None:
    ring = ReceiptRing(100)
    for number in range(100):
        ring.add((f"r{number}", "", ""), bytes(100_000), failed=False)
    assert 1 <= len(ring) <= 6
    assert ring.size_bytes <= 640_000


@pytest.mark.parametrize(
    ("name", "places"),
    [
        (f"chatcmpl-{HEX}-0~7", [0]),
        (f"chatcmpl-{HEX}-1", [1]),
        # The HTTP request that both were choices of, by its id with and without what the API puts before it.
        (f"chatcmpl-{HEX}", [0, 1]),
        (HEX, [0, 1]),
        (f"cmpl-{HEX}-7", [0, 1]),
        # A label is the client's, and several requests may have it.
        ("mine", [1, 2]),
        ("chatcmpl", []),
        ("", []),
        ("0123456789abcdef", []),
    ],
)
def test_a_request_is_found_by_whatever_name_a_user_has_in_hand(name: str, places: list[int]) -> None:
    ids = [
        (f"chatcmpl-{HEX}-0~7", f"chatcmpl-{HEX}-0", ""),
        (f"chatcmpl-{HEX}-1~8", f"chatcmpl-{HEX}-1", "mine"),
        ("other~9", "other", "mine"),
    ]
    assert meant(ids, name) == places
