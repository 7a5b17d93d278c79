"""Records as they are written, and what readers make of what others wrote."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_discovery.errors import RecordError
from omni_discovery.records.schema import (
    HubRecord,
    ReplicaEvent,
    ReplicaInfo,
    ReplicaList,
    ReplicaRecord,
    ReplicaStatus,
    decode_hub,
    decode_replica,
    encode_record,
)

#: Sets a title, clears the screen as C0 and as C1, turns the direction of writing, has no width.
OBEYED = "\x1b]0;x\x07\x1b[2J\x9b2J\u202ex\u2066\u200b\x7f"

SEVEN: dict[str, Any] = {
    "input_addr": "tcp://h:1",
    "output_addr": "tcp://h:2",
    "stage_id": 1,
    "status": ReplicaStatus.UP,
    "queue_length": 3,
    "last_heartbeat": 2.0,
    "registered_at": 1.0,
}
WRITTEN: dict[str, Any] = {
    "schema": 1, "stage_id": 1, "replica_id": 2, "input_addr": "i", "output_addr": "o", "status": "up",
}  # fmt: skip


def decode(value: bytes | dict[str, Any]) -> ReplicaRecord:
    return decode_replica("key", 1, 2, value if isinstance(value, bytes) else json.dumps(value).encode())


def test_statuses_are_the_strings_that_they_stand_for() -> None:
    assert (ReplicaStatus.UP, ReplicaStatus.DOWN, ReplicaStatus.ERROR) == ("up", "down", "error")
    assert json.dumps(ReplicaStatus.UP) == '"up"'


def test_a_replica_can_be_built_from_the_seven_fields_of_the_seeds() -> None:
    info = ReplicaInfo(**SEVEN)
    assert [field.name for field in dataclasses.fields(ReplicaInfo)][:7] == list(SEVEN)
    assert (info.replica_id, info.epoch) == (-1, 0)


def test_voices_are_in_a_record_only_where_there_are_some() -> None:
    """So that releases without them write and read the same bytes."""
    silent = decode(WRITTEN)
    assert b"voices" not in encode_record(silent)
    assert silent.to_info(1).voices == []
    speaking = decode({**WRITTEN, "voices": ["ann", "b\x1b]ob"]})
    assert decode(encode_record(speaking)).to_info(1).voices == ["ann", "b_]ob"]
    for wrong in (["x" * 65], [""], ["x"] * 257, "ann", [5]):
        with pytest.raises(RecordError):
            decode({**WRITTEN, "voices": wrong})


def test_an_event_has_the_six_fields_of_the_seeds_in_their_order() -> None:
    names = [field.name for field in dataclasses.fields(ReplicaEvent)]
    assert names == ["input_addr", "output_addr", "stage_id", "event_type", "status", "queue_length"]


def test_a_list_survives_json() -> None:
    listed = ReplicaList([ReplicaInfo(**SEVEN)], 5.0)
    read = json.loads(json.dumps(dataclasses.asdict(listed)))
    infos = [ReplicaInfo(**{**row, "status": ReplicaStatus(row["status"])}) for row in read["replicas"]]
    assert ReplicaList(infos, read["timestamp"]) == listed


def test_a_record_is_readable_json_and_comes_back() -> None:
    record = ReplicaRecord(stage_id=1, replica_id=2, input_addr="i", output_addr="o", status=ReplicaStatus.STARTING)
    assert json.loads(encode_record(record))["status"] == "starting"
    assert decode(encode_record(record)) == record


#: The JSON of a record as this release writes it; a reader of any release finds each field where it was.
GOLDEN = (
    b'{"schema":1,"stage_id":1,"replica_id":2,"input_addr":"i","output_addr":"o","status":"up","epoch":3,"phase":"ready",'
    b'"progress":1.0,"reason":"","queue_length":4,"capacity":8,"weight":1.0,"registered_at":1.5,"updated_at":2.5,'
    b'"host":"h","pid":9,"device":"cuda:0","model":"/m","fingerprint":"f00d","version":"0","labels":{"zone":"a"},'
    b'"curve_public_key":"k","connectors":{},"control_revision":0,"control_error":"","cordoned":false,'
    b'"revision":"main","dtype":"bfloat16","tokenizer":"aa","content":"bb","code":"omni-discovery 0"}'
)


def test_a_record_is_written_as_it_always_was_with_new_fields_behind() -> None:
    record = decode(GOLDEN)
    assert encode_record(record) == GOLDEN
    info = record.to_info(3)
    told = (info.revision, info.dtype, info.tokenizer, info.content, info.code)
    assert told == ("main", "bfloat16", "aa", "bb", "omni-discovery 0")
    before = json.loads(GOLDEN)
    for name in ("revision", "dtype", "tokenizer", "content", "code"):
        del before[name]
    old = decode(before)
    assert (old.fingerprint, old.revision, old.dtype, old.tokenizer, old.content, old.code) == ("f00d", *[""] * 5)


def test_a_replica_that_can_show_unfinished_pictures_says_so_and_any_other_says_nothing() -> None:
    plain = decode(WRITTEN)
    assert b"partial_images" not in encode_record(plain)
    assert plain.to_info(1).partial_images is False
    painter = decode({**WRITTEN, "partial_images": True})
    assert painter.to_info(1).partial_images is True
    assert decode(encode_record(painter)) == painter


def test_a_replica_that_is_deterministic_says_so_and_any_other_says_nothing() -> None:
    """A record without the field is that of a release before, or of a stage that does not repeat itself."""
    plain = decode(WRITTEN)
    assert b"deterministic" not in encode_record(plain)
    assert plain.to_info(1).deterministic is False
    for said in (True, False):
        record = decode({**WRITTEN, "deterministic": said})
        assert record.to_info(1).deterministic is said
        assert decode(encode_record(record)) == record


def test_the_info_of_a_record_has_every_field_of_it_and_the_epoch_of_the_key() -> None:
    record = decode({**WRITTEN, "epoch": 5, "updated_at": 9.0, "labels": {"a": "b"}, "device": "cuda:0"})
    info = record.to_info(epoch=7)
    assert (info.epoch, info.last_heartbeat, info.labels, info.device) == (7, 9.0, {"a": "b"}, "cuda:0")


def test_what_a_later_release_adds_is_ignored() -> None:
    assert decode({**WRITTEN, "schema": 9, "mood": "good"}).replica_id == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"queue_length": -1}, {"queue_length": None}, {"queue_length": 1.5}, {"status": "fine"}, {"stage_id": -1},
        {"stage_id": "1"}, {"replica_id": 3}, {"stage_id": 2}, {"input_addr": ""}, {"capacity": 0}, {"progress": 2},
        {"weight": -1}, {"labels": {"a": 1}}, {"host": "x" * 5000}, {"schema": 0},
    ],
)  # fmt: skip
def test_a_record_that_can_not_be_right_is_refused_with_its_key(wrong: dict[str, Any]) -> None:
    with pytest.raises(RecordError) as caught:
        decode({**WRITTEN, **wrong})
    assert caught.value.key == "key"


@pytest.mark.parametrize("missing", ["stage_id", "replica_id", "input_addr", "output_addr", "status"])
def test_a_record_without_its_main_fields_is_refused(missing: str) -> None:
    with pytest.raises(RecordError):
        decode({name: value for name, value in WRITTEN.items() if name != missing})


@settings(deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_a_record_or_a_record_error(value: bytes) -> None:
    for read in (lambda: decode(value), lambda: decode_hub("key", "h", value)):
        with contextlib.suppress(RecordError):
            read()


@pytest.mark.parametrize("value", [b"[" * 100_000, b'{"stage_id": 1e999}', b'{"labels":' * 5000, b"\xff\xfe\x00"])
def test_what_breaks_other_parsers_is_a_record_error(value: bytes) -> None:
    with pytest.raises(RecordError):
        decode(value)


def test_a_hub_under_another_hubs_key_is_refused() -> None:
    value = encode_record(HubRecord(hub_id="h1", curve_public_key="k"))
    assert decode_hub("key", "h1", value).curve_public_key == "k"
    with pytest.raises(RecordError, match="h1"):
        decode_hub("key", "h2", value)


@pytest.mark.attack("A18")
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("text", [OBEYED, "a\x7fb", "two\nlines", "\u202e"])
def test_texts_of_records_are_printable_whatever_was_written(text: str, ascii_only: bool) -> None:
    texts = ("reason", "phase", "host", "model", "device", "version", "control_error", "input_addr")
    value = json.dumps(WRITTEN | dict.fromkeys(texts, text), ensure_ascii=ascii_only).encode()
    record = decode_replica("k", 1, 2, value)
    assert [name for name in texts if not getattr(record, name).isprintable()] == []
    assert record.status is ReplicaStatus.UP
    hub = json.dumps({"hub_id": "h", "host": text, "address": text}, ensure_ascii=ascii_only).encode()
    assert decode_hub("k", "h", hub).host.isprintable()
    assert str(RecordError(text, text)).isprintable()


def test_a_printable_text_of_any_language_is_kept() -> None:
    value = json.dumps(WRITTEN | {"reason": "kein Platz für 漢字"}, ensure_ascii=False).encode()
    assert decode_replica("k", 1, 2, value).reason == "kein Platz für 漢字"
