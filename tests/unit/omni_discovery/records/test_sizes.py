"""Values that are too long for any record are cut where they are read, and never decoded."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest

from omni_discovery.errors import RecordError
from omni_discovery.kv import KeyValue
from omni_discovery.records import keys
from omni_discovery.records.api_key import decode_api_key
from omni_discovery.records.beat import decode_beat
from omni_discovery.records.jobs import job_key
from omni_discovery.records.params import ParamBounds
from omni_discovery.records.schema import (
    MOST_PARAMS,
    MOST_VOICES,
    ReplicaRecord,
    ReplicaStatus,
    decode_hub,
    decode_replica,
)
from omni_discovery.records.schema import encode_record as encoded
from omni_discovery.records.sizes import (
    MAX_KEY_BYTES,
    MAX_PARTS,
    MAX_VALUE_BYTES,
    MOST_JOB_BYTES,
    ListRoom,
    begin_of_cut,
    check_value,
    cut_value,
    decode_key,
)
from omni_discovery.records.waits import decode_waits

KEY = keys.replica_key("n", 0, 7)
RECORD = b'{"stage_id":0,"replica_id":7,"input_addr":"i","output_addr":"o","status":"up"%b}'
NESTED = RECORD % (b',"connectors":{"a":[' + b",".join([b"[]"] * 480_000) + b"]}")


def test_only_what_is_too_long_is_cut_and_the_document_never() -> None:
    fits, long = b"x" * MAX_VALUE_BYTES, b"x" * 1_000_000
    for key in (KEY, keys.hub_key("n", "h"), "/omni/v1/n/replicas/0/pipeline", "/omni/v1/n"):
        assert cut_value(key, fits) is fits
        assert len(cut_value(key, long)) == MAX_VALUE_BYTES + 1
    for key in (keys.pipeline_key("n"), "/others/key", ""):
        assert cut_value(key, long) is long


@pytest.mark.attack("Z11")
@pytest.mark.parametrize("letter", ["x", "é", "中", "😀"])
def test_a_longer_key_than_any_is_cut_and_still_another_than_those_with_the_same_begin(letter: str) -> None:
    begin = f"{KEY}/{letter * MAX_KEY_BYTES}"
    one, other = (decode_key(f"{begin}{letter * 100_000}{end}".encode()) for end in "ab")
    assert one != other
    assert one.startswith(f"{KEY}/{letter}")
    assert len(one.encode()) < MAX_KEY_BYTES + 50
    assert begin.startswith(begin_of_cut(one))
    assert len(begin_of_cut(one).encode()) > MAX_KEY_BYTES - 4
    assert keys.parse_key("n", one) is None


def test_a_key_that_is_not_cut_is_as_it_is_even_if_it_looks_cut() -> None:
    for key in (KEY, f"{KEY}... of 9 bytes, 0", job_key("n", "x" * 60)):
        assert decode_key(key.encode()) == key
        assert begin_of_cut(key) == ""
    assert decode_key(b"/omni/v1/n/\xff") == "/omni/v1/n/\\xff"


@pytest.mark.attack("Z11")
@pytest.mark.parametrize("end", [b"\xff" * 125, b"9 bytes, " + b"0" * 16, b"9 bytes, " + b"0" * 400])
def test_a_whole_key_that_looks_cut_has_no_begin_that_others_share(end: bytes) -> None:
    """Operators are told to delete what has the begin of a key that was cut."""
    key = decode_key(keys.replicas_prefix("n").encode() + b"... of " + end)
    assert begin_of_cut(key) == ""


@pytest.mark.attack("K4")
def test_a_megabyte_of_lists_is_refused_before_it_is_decoded_cut_or_not() -> None:
    for value in (NESTED, cut_value(KEY, NESTED)):
        tracemalloc.start()
        try:
            with pytest.raises(RecordError, match=f"{KEY}: has more than {MAX_VALUE_BYTES} bytes.*etcdctl del"):
                decode_replica(KEY, 0, 7, value)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


@pytest.mark.attack("K4")
@pytest.mark.parametrize("part", [b"[],", b"1,", b'{"":0},'])
def test_lists_that_fit_into_a_record_are_too_many_all_the_same(part: bytes) -> None:
    value = RECORD % (b',"connectors":{"a":[' + (part * MAX_PARTS)[:-1] + b"]}")
    assert len(value) < MAX_VALUE_BYTES
    with pytest.raises(RecordError, match=f"more than {MAX_PARTS} parts"):
        decode_replica(KEY, 0, 7, value)
    few = RECORD % (b',"connectors":{"a":[' + (part * 1000)[:-1] + b"]}")
    assert decode_replica(KEY, 0, 7, few).connectors


@pytest.mark.attack("Q1")
def test_numbers_that_take_long_to_be_read_are_too_many_for_a_record() -> None:
    value = RECORD % (b',"connectors":{"a":[' + b",".join([b"1e308"] * 2000) + b"]}")
    for decode in (lambda: decode_replica(KEY, 0, 7, value), lambda: decode_beat("b", value)):
        with pytest.raises(RecordError, match="more than 1024 numbers such as 1e300, as no record has"):
            decode()


def test_every_kind_of_record_is_refused_so() -> None:
    long = b"{" + b" " * MAX_VALUE_BYTES + b"}"
    item = KeyValue("k", long, 1, 1)
    for read in (
        lambda: decode_hub("k", "h", long),
        lambda: decode_beat("k", long),
        lambda: decode_waits("k", long),
        lambda: decode_api_key(item),
    ):
        with pytest.raises(RecordError, match=f"more than {MAX_VALUE_BYTES} bytes"):
            read()


def test_the_longest_record_that_anybody_has_is_read() -> None:
    bounds = ParamBounds(type="number", minimum=-(1 << 53), maximum=1 << 53, multiple_of=1024)
    edge = {"connector": "MooncakeTransferEngineConnector", "host": "h" * 60, "zmq_port": 40_000, "session": "s" * 60}
    record = ReplicaRecord(
        stage_id=0,
        replica_id=7,
        input_addr="tcp://" + "h" * 200,
        output_addr="tcp://" + "h" * 200,
        status=ReplicaStatus.DRAINING,
        reason="因" * 4096,
        labels={f"label-{number}": "v" * 60 for number in range(30)},
        connectors={f"0-{number}": edge for number in range(8)},
        voices=tuple("声" * 62 + f"{number:02x}" for number in range(MOST_VOICES)),
        params={"p" * 62 + f"{number:02x}": bounds for number in range(MOST_PARAMS)},
    )
    value = encoded(record)
    assert 75_000 < len(value) < MAX_VALUE_BYTES
    check_value(KEY, value)
    assert msgspec.structs.asdict(decode_replica(KEY, 0, 7, value))["reason"] == record.reason


def test_a_value_may_be_as_long_as_the_bound_and_have_as_many_parts() -> None:
    check_value(KEY, b"x" * MAX_VALUE_BYTES)
    check_value(KEY, b"," * MAX_PARTS)
    for wrong in (b"x" * (MAX_VALUE_BYTES + 1), b"," * (MAX_PARTS + 1)):
        with pytest.raises(RecordError):
            check_value(KEY, wrong)


@pytest.mark.attack("V2")
def test_the_waits_of_one_list_take_two_mebibytes_and_all_else_comes_whole() -> None:
    room = ListRoom()
    values = [room.fit(keys.wait_key("n", f"w{number}"), bytes(90_000)) for number in range(100)]
    assert 10 < sum(map(bool, values)) < 30
    assert values[-1] == b""
    for key in (KEY, keys.pipeline_key("n"), "/other/waits/a", job_key("n", "video_1")):
        assert room.fit(key, b"value") == b"value"


@pytest.mark.attack("X4")
def test_the_jobs_of_one_list_have_their_share_of_memory_and_none_is_longer_than_a_job() -> None:
    room, key = ListRoom(), job_key("n", "video_1")
    value = cut_value(key, bytes(1_000_000))
    assert len(value) == MOST_JOB_BYTES + 1
    kept = sum(len(room.fit(key, value)) for _ in range(100_000))
    assert 90 << 20 < kept <= 96 << 20
    assert room.fit(keys.wait_key("n", "w"), b"value") == b"value"
