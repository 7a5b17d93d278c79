"""What a process without a record of its own waits for, such as a supervisor for the deploy document.

A leased key under ``waits/``, so that ``omni doctor`` sees it from any machine. Nobody else reads it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from enum import StrEnum
from typing import Annotated, Final

import msgspec

from omni_discovery.errors import RecordError
from omni_discovery.kv import KeyValue
from omni_discovery.records import keys
from omni_discovery.records.sizes import WallTime, check_value
from omni_discovery.text import one_line

_Text = Annotated[str, msgspec.Meta(max_length=4096)]


#: How the reason of a process begins that waits for nothing: so a release that does not know its kind shows it, too.
HAS_ENDED: Final = "it has ended"


class WaitKind(StrEnum):
    """What is waited for. Later releases may write others, earlier ones write none."""

    #: The deploy document.
    PIPELINE = "pipeline"
    #: A device that another process has.
    DEVICES = "devices"
    #: Room in the Ray cluster.
    ROOM = "room"
    #: The next try after a process has ended.
    RESTART = "restart"
    #: The same, where it ends soon after every start.
    CRASH_LOOP = "crash-loop"
    #: The same, where its configuration is wrong.
    MISCONFIGURED = "misconfigured"
    #: Nothing: the process has ended, since its settings can't be used here.
    REFUSED = "refused"


class WaitEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One wait. ``who`` waits since wall-clock ``since``, because of ``reason``."""

    who: _Text
    reason: _Text
    since: WallTime
    #: A WaitKind, or a word of a later release; empty: not known.
    kind: _Text = ""
    #: The stage whose replicas are waited for; None: not known.
    stage_id: Annotated[int, msgspec.Meta(ge=0, lt=1_000_000_000)] | None = None


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
    """The records of those that wait now among the keys of a namespace, in key order."""
    return [record for record in _records_among(items, namespace) if not _is_last_word(record)]


def last_words_among(items: Iterable[KeyValue], namespace: str) -> list[WaitRecord]:
    """The records of processes that have ended, and say why."""
    return [record for record in _records_among(items, namespace) if _is_last_word(record)]


def _is_last_word(record: WaitRecord) -> bool:
    return any(entry.kind == WaitKind.REFUSED for entry in record.waits)


#: Waits that are looked at, of all processes together: who may write one may write any number.
_MOST_READ: Final = 4096


def _records_among(items: Iterable[KeyValue], namespace: str) -> list[WaitRecord]:
    """The records that can be read; of too many the first."""
    found, room = [], _MOST_READ
    for item in items:
        if isinstance(keys.parse_key(namespace, item.key), keys.WaitKey):
            room -= 1
            with suppress(RecordError):
                record = decode_waits(item.key, item.value)
                room -= len(record.waits)
                found.append(record)
            if room <= 0:
                break
    return found


def describe_waits(record: WaitRecord) -> str:
    """Who waits where, and for what, without how long."""
    return "; ".join(
        f"{one_line(entry.who)}, process {record.pid} on {one_line(record.host)}, waits: {one_line(entry.reason)}"
        for entry in record.waits
    )
