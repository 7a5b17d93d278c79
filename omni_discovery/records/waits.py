"""What a process without a record of its own waits for, such as a supervisor for the deploy document.

A leased key under ``waits/``, so that ``omni doctor`` sees it from any machine. Nobody else reads it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated

import msgspec

from omni_discovery.errors import RecordError
from omni_discovery.kv import KeyValue
from omni_discovery.records import keys
from omni_discovery.records.sizes import check_value
from omni_discovery.text import one_line

_Text = Annotated[str, msgspec.Meta(max_length=4096)]


class WaitEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One wait. ``who`` waits since wall-clock ``since``, because of ``reason``."""

    who: _Text
    reason: _Text
    since: float


class WaitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON under ``waits/<name>``: all that one process waits for."""

    schema: Annotated[int, msgspec.Meta(ge=1)] = 1
    host: _Text
    pid: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
    waits: Annotated[list[WaitEntry], msgspec.Meta(max_length=4096)]


def encode_waits(record: WaitRecord) -> bytes:
    """The record as JSON."""
    return msgspec.json.encode(record)


def decode_waits(key: str, value: bytes) -> WaitRecord:
    """Decode a record. Raise RecordError."""
    check_value(key, value)
    try:
        return msgspec.json.decode(value, type=WaitRecord)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(key, str(error)) from error


def waits_among(items: Iterable[KeyValue], namespace: str) -> list[WaitRecord]:
    """The records among the keys of a namespace, in key order; those that can't be read are left out."""
    found = []
    for item in items:
        if isinstance(keys.parse_key(namespace, item.key), keys.WaitKey):
            with suppress(RecordError):
                found.append(decode_waits(item.key, item.value))
    return found


def describe_waits(record: WaitRecord) -> str:
    """Who waits where, and for what, without how long."""
    return "; ".join(
        f"{one_line(entry.who)}, process {record.pid} on {one_line(record.host)}, waits: {one_line(entry.reason)}"
        for entry in record.waits
    )
