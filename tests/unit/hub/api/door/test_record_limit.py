"""Records of TLS that bring no HTTP are counted, however they are cut into pieces."""

from __future__ import annotations

import pytest

from hub.api.door.record_limit import RecordLimit


def record(size: int) -> bytes:
    return b"\x17\x03\x03" + size.to_bytes(2) + bytes(size)


KEY_UPDATE = record(22)


@pytest.mark.attack("G2")
@pytest.mark.parametrize("slice_bytes", [1, 3, 27, 100, 4096])
def test_some_hundreds_of_records_without_http_are_too_many(slice_bytes: int) -> None:
    limit, sent = RecordLimit(), KEY_UPDATE * 600
    pieces = [sent[start : start + slice_bytes] for start in range(0, len(sent), slice_bytes)]
    first = next(number for number, each in enumerate(pieces, 1) if limit.came(each, 0))
    assert 512 * 27 < first * slice_bytes <= len(pieces) * slice_bytes


def test_what_brings_http_is_never_too_much() -> None:
    """Tiny WebSocket frames; a large body, of which nothing is there before a record's end; bytes that wait a while."""
    limit = RecordLimit()
    assert not any(limit.came(record(6 + 17), 6) for _ in range(10_000))
    assert limit.unpaid == 0
    body = record(16401) * 200
    assert not any(limit.came(body[start : start + 4096], 0) for start in range(0, len(body), 4096))
    assert limit.unpaid == 0
    assert not limit.came(record(23) * 300, 0)
    limit.came(b"", 300 * 6)
    assert limit.unpaid == 0


def test_http_does_not_pay_for_what_follows() -> None:
    limit = RecordLimit()
    limit.came(record(16401), 16384)
    assert limit.came(KEY_UPDATE * 600, 0)


def test_what_is_no_tls_is_counted_as_little() -> None:
    limit = RecordLimit()
    assert not any(limit.came(b"GET / HTTP/1.1\r\n\r\n" * 200, 0) for _ in range(3))
