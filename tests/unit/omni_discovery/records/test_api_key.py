"""What etcd holds of an API key: its hash and when it was made; a value that is none opens nothing."""

from __future__ import annotations

import hashlib
import json

import pytest

from omni_discovery.errors import ConfigError, RecordError
from omni_discovery.kv import KeyValue
from omni_discovery.records import keys
from omni_discovery.records.api_key import (
    KEY_BYTES,
    decode_api_key,
    digest_of,
    encode_api_key,
    make_key,
    read_api_keys,
)


def item(name: str, value: bytes) -> KeyValue:
    return KeyValue(keys.api_key_key("team", name), value, 1, 1)


def test_a_key_is_128_random_bits_and_etcd_gets_their_hash_alone() -> None:
    key = make_key(bytes(range(KEY_BYTES)))
    assert (KEY_BYTES, key) == (16, "omni-000102030405060708090a0b0c0d0e0f")
    value = encode_api_key(key, 12.0)
    assert json.loads(value) == {"schema": 1, "sha256": hashlib.sha256(key.encode()).hexdigest(), "created_at": 12.0}
    assert decode_api_key(item("alice", value)).sha256 == digest_of(key).hex()
    assert key.removeprefix("omni-").encode() not in value


@pytest.mark.parametrize(
    "value",
    [
        b'{"x":' + b"[" * 3000 + b"]" * 3000 + b"}",
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b'{"sha256": "abc"}',
        b'{"sha256": "' + b"A" * 64 + b'"}',
        b'{"sha256": null}',
    ],
)
@pytest.mark.attack("Z47")
def test_a_value_that_is_none_is_told_and_the_others_are_read(value: bytes) -> None:
    with pytest.raises(RecordError):
        decode_api_key(item("x", value))
    good = item("alice", encode_api_key("k", 0))
    found, bad = read_api_keys("team", [item("x", value), good, KeyValue("/omni/v1/team/keys/a/b", good.value, 1, 1)])
    assert (list(found), [error.key for error in bad]) == (
        ["alice"],
        ["/omni/v1/team/keys/x", "/omni/v1/team/keys/a/b"],
    )


def test_fields_of_a_later_release_are_ignored_and_a_moment_is_one_that_a_person_can_read() -> None:
    value = json.loads(encode_api_key("k", 5.0)) | {"schema": 2, "limit": 3}
    assert decode_api_key(item("a", json.dumps(value).encode())).created_at == 5.0
    with pytest.raises(RecordError):
        decode_api_key(item("a", json.dumps(value | {"created_at": 1e300}).encode()))


@pytest.mark.parametrize("name", ["", "a b", "a/b", "-a", "a" * 64, "a:b", "ä"])
def test_a_name_that_no_key_can_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="can't be a key's name"):
        keys.check_key_name(name)
    assert keys.check_key_name("team-a.ci_1") == "team-a.ci_1"
