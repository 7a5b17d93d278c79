"""Names of the objects in which the files of jobs lie, and what the first object of a file holds. Pure.

An object is ``omni-jobs/<namespace>/<hour>/<job>.<part>/<number>``: the hour in which the job was made is there for the
sweep, as a store has no times. Numbers 0 to 7 are heads, of which a file has one. The slices of a longer file have the
token of its head in their names, so that no two attempts write to the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final

import msgspec

from hub.jobs.errors import JobFileError
from omni_discovery.records.jobs import JobRecord

#: The longest slice of a file.
SLICE_BYTES: Final = 4 << 20
#: A head has a number: a name under which a client was killed while it wrote can't be used for some time.
MOST_HEADS: Final = 8
#: The longest object: a slice, and what a head says beside it.
MOST_OBJECT_BYTES: Final = SLICE_BYTES + 1024
_ROOT: Final = "omni-jobs"
_HOUR_S: Final = 3600
#: Files of so many hours before and after this one are left alone, whatever their jobs: a record may be about to be
#: written, and the clocks of hubs differ.
_YOUNG_HOURS: Final = 2


class Head(msgspec.Struct, frozen=True, array_like=True):
    """The first object of a file."""

    size_bytes: Annotated[int, msgspec.Meta(ge=0)]
    token: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]
    first: bytes


def job_prefix(namespace: str, job: JobRecord) -> str:
    """What the names of all objects of a job begin with."""
    return f"{_ROOT}/{namespace}/{_hour(job.created_at)}/{job.job_id}."


def file_prefix(namespace: str, job: JobRecord, part: str) -> str:
    """What the names of all objects of a file begin with."""
    return f"{job_prefix(namespace, job)}{part}/"


def head_names(prefix: str) -> list[str]:
    """The names that the head of a file may have."""
    return [f"{prefix}{number}" for number in range(MOST_HEADS)]


def slice_name(prefix: str, token: str, number: int) -> str:
    """The name of a slice, counted from 1."""
    return f"{prefix}{token}-{number}"


def slices_of(size_bytes: int) -> int:
    """In how many slices a file lies; the first one is in its head."""
    return max(1, -(-size_bytes // SLICE_BYTES))


def encode_head(head: Head) -> bytes:
    """The content of a head."""
    return msgspec.msgpack.encode(head)


def decode_head(content: bytes, most_bytes: int) -> Head:
    """The head of a file that is no longer than that. Raise JobFileError."""
    try:
        head = msgspec.msgpack.decode(content, type=Head)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise JobFileError("a file of this job is none that a hub has written") from error
    if head.size_bytes > most_bytes or len(head.first) != min(head.size_bytes, SLICE_BYTES):
        raise JobFileError("a file of this job is none that a hub has written")
    return head


def pattern_of(prefix: str) -> str:
    """The regular expression of all names that begin so. Of all signs in names, only the dot means something in one."""
    return "^" + prefix.replace(".", "[.]")


def orphans_pattern(namespace: str, known: Iterable[JobRecord], now_s: float) -> str:
    """The expression of the names of a namespace but those of young hours, and of hours of which a job is known."""
    this = _hour(now_s)
    young = range(this - _YOUNG_HOURS, this + _YOUNG_HOURS + 1)
    kept = sorted({*young, *(_hour(job.created_at) for job in known)})
    return f"{pattern_of(f'{_ROOT}/{namespace}/')}(?!({'|'.join(map(str, kept))})/)"


def _hour(at_s: float) -> int:
    return int(at_s // _HOUR_S)
