"""The API keys of a namespace: what etcd holds of each, and how a key is made of 128 random bits. Pure.

etcd holds the SHA-256 of a key, never the key. A slow hash is for passwords, which can be guessed one after the other;
nobody guesses one of 2**128 keys, however fast each guess is, and a slow hash would cost every request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Annotated, Final

import msgspec

from omni_discovery.errors import RecordError
from omni_discovery.kv import KeyValue
from omni_discovery.records import keys
from omni_discovery.records.schema import SCHEMA
from omni_discovery.records.sizes import check_value

#: Random bytes of a key.
KEY_BYTES: Final = 16
#: The first wall-clock second that has no date.
_YEAR_10000_S: Final = 253_402_300_800
#: Begins a key that was made here, so that it is recognised where it does not belong.
_PREFIX: Final = "omni-"


class ApiKeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The value of ``keys/<name>``."""

    schema: int = SCHEMA
    #: The SHA-256 of the key, in hexadecimal.
    sha256: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    #: Wall-clock time at which it was made.
    created_at: Annotated[float, msgspec.Meta(ge=0, lt=_YEAR_10000_S)] = 0.0


def make_key(random_bytes: bytes) -> str:
    """The text of a key of ``KEY_BYTES`` random bytes."""
    return _PREFIX + random_bytes.hex()


def digest_of(key: str) -> bytes:
    """The SHA-256 of a key; of text that no header can hold as well."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def encode_api_key(key: str, created_at: float) -> bytes:
    """The value for etcd of a key."""
    return msgspec.json.encode(ApiKeyRecord(sha256=digest_of(key).hex(), created_at=created_at))


def decode_api_key(item: KeyValue) -> ApiKeyRecord:
    """The record in a value of etcd. Raise RecordError if it is none."""
    check_value(item.key, item.value)
    try:
        return msgspec.json.decode(item.value, type=ApiKeyRecord)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(item.key, str(error)) from error


def read_api_keys(namespace: str, items: Iterable[KeyValue]) -> tuple[dict[str, ApiKeyRecord], list[RecordError]]:
    """The keys among items of etcd, by name; and the errors of those that can't be read, which open nothing."""
    found, bad = {}, []
    for item in items:
        match keys.parse_key(namespace, item.key):
            case keys.ApiKeyKey(name):
                try:
                    found[name] = decode_api_key(item)
                except RecordError as error:
                    bad.append(error)
            case _:
                bad.append(RecordError(item.key, "is not the name of an API key"))
    return found, bad
