"""The key in which a process says what it waits for."""

from __future__ import annotations

import pytest

from omni_discovery.errors import RecordError
from omni_discovery.kv import KeyValue, Listing
from omni_discovery.records import keys
from omni_discovery.records.waits import (
    WaitEntry,
    WaitKind,
    WaitRecord,
    decode_waits,
    describe_waits,
    encode_waits,
    last_words_among,
    waits_among,
)
from omni_discovery.view.table import ReplicaTable

RECORD = WaitRecord(host="gpu-1", pid=7, waits=[WaitEntry(who="the supervisor", reason="no pipeline", since=5.0)])
KEY = keys.wait_key("n", "0123abcd")


def test_the_bytes_are_these() -> None:
    value = b'{"schema":1,"host":"gpu-1","pid":7,"waits":[{"who":"the supervisor","reason":"no pipeline","since":5.0}]}'
    assert encode_waits(RECORD) == value
    assert decode_waits(KEY, value) == RECORD
    assert describe_waits(RECORD) == "the supervisor, process 7 on gpu-1, waits: no pipeline"


def test_a_record_with_a_last_word_among_others_is_one_of_a_process_that_has_ended() -> None:
    refused = WaitEntry(who="a stage", reason="no such model", since=6.0, kind=WaitKind.REFUSED)
    item = KeyValue(KEY, encode_waits(WaitRecord(host="h", pid=7, waits=[*RECORD.waits, refused])), 1, 1)
    assert waits_among([item], "n") == []
    assert len(last_words_among([item], "n")) == 1


@pytest.mark.parametrize("value", [b"", b"[]", b"[" * 5000, b'{"host": 1}', b"\xff"])
def test_what_is_no_record_is_an_error_and_left_out_of_a_list(value: bytes) -> None:
    with pytest.raises(RecordError):
        decode_waits(KEY, value)
    items = [KeyValue(KEY, value, 1, 1), KeyValue(keys.wait_key("n", "b"), encode_waits(RECORD), 1, 1)]
    assert waits_among(items, "n") == [RECORD]


def test_a_view_has_no_part_in_it_but_counts_it_as_the_registry_does() -> None:
    """A hub, also of an older release, compares count and latest revision of all keys with etcd's."""
    assert keys.parse_key("n", KEY) == keys.WaitKey("0123abcd")
    table = ReplicaTable("n")
    table.replace(Listing(9, 1, (KeyValue(KEY, encode_waits(RECORD), 8, 9),)), 0.0)
    view = table.snapshot()
    assert not (view.replicas)
    assert not (view.hubs)
    assert not (view.bad)
    assert not (view.revoked)
    assert (table.summary().count, table.summary().max_mod_revision) == (1, 9)


def test_last_words_are_no_wait_and_a_kind_of_a_later_release_is_one() -> None:
    def record(kind: str) -> WaitRecord:
        return WaitRecord(host="h", pid=1, waits=[WaitEntry(who="w", reason="r", since=1.0, kind=kind, stage_id=2)])

    refused, later = record(WaitKind.REFUSED), record("of tomorrow")
    items = [
        KeyValue(keys.wait_key("n", name), encode_waits(each), 1, 1) for name, each in (("a", refused), ("b", later))
    ]
    assert waits_among(items, "n") == [later]
    assert last_words_among(items, "n") == [refused]


@pytest.mark.attack("N7")
@pytest.mark.parametrize("since", ["-1e308", "1e308", "-1.0", "1e11"])
def test_a_wait_since_a_moment_that_no_clock_shows_is_not_shown(since: str) -> None:
    """As an age it has hundreds of digits on the operator's screen."""
    value = f'{{"host":"h","pid":1,"waits":[{{"who":"w","reason":"r","since":{since},"kind":"refused"}}]}}'.encode()
    items = [KeyValue(keys.wait_key("default", "h-1"), value, 1, 1)]
    assert last_words_among(items, "default") == []
    assert len(last_words_among([KeyValue(items[0].key, value.replace(since.encode(), b"5.0"), 1, 1)], "default")) == 1


def test_what_lies_under_another_key_is_no_wait() -> None:
    value = encode_waits(RECORD)
    items = [KeyValue(key, value, 1, 1) for key in (KEY, keys.hub_key("n", "h"), KEY + "/more")]
    assert waits_among(Listing(1, 1, tuple(items)).items, "n") == [RECORD]


@pytest.mark.attack("V2")
def test_of_too_many_waits_the_first_are_read() -> None:
    """However many records there are, and however many entries each has."""
    full = encode_waits(WaitRecord(host="h", pid=1, waits=list(RECORD.waits) * 1000))
    found = waits_among([KeyValue(keys.wait_key("n", f"w{number}"), full, 1, 1) for number in range(100)], "n")
    assert sum(len(record.waits) for record in found) <= 5000
    plain = encode_waits(RECORD)
    found = waits_among([KeyValue(keys.wait_key("n", f"w{number}"), plain, 1, 1) for number in range(9000)], "n")
    assert 1000 <= len(found) <= 5000
