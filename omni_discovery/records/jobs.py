"""Jobs of a namespace: requests whose answers are fetched later, as etcd holds them, and their keys. Pure.

They lie under a root of their own, which no hub watches. Prompts, answers and the texts of errors are never here: they
are in the files of the job store, encrypted.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Final

import msgspec

from omni_discovery.errors import RecordError
from omni_discovery.kv import KeyValue
from omni_discovery.records.keys import JOBS_ROOT, check_namespace
from omni_discovery.records.schema import SCHEMA
from omni_discovery.records.sizes import MOST_JOB_BYTES

_JOB_ID: Final = "video_[0-9a-f]{32}"
_is_job_id: Final = re.compile(_JOB_ID).fullmatch
#: The first wall-clock second that has no date.
_YEAR_10000_S: Final = 253_402_300_800

_Moment = Annotated[float, msgspec.Meta(ge=0, lt=_YEAR_10000_S)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Lease = Annotated[int, msgspec.Meta(ge=0)]
_Name = Annotated[str, msgspec.Meta(pattern=r"\A([A-Za-z0-9][A-Za-z0-9_.-]{0,62})?\Z")]
_Word = Annotated[str, msgspec.Meta(pattern=r"\A[a-z0-9_.]{0,40}\Z")]


class JobState(StrEnum):
    """The state of a job, in OpenAI's words."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    FAILED = "failed"


class JobRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The value of ``jobs/<id>``."""

    schema: Annotated[int, msgspec.Meta(ge=1)] = SCHEMA
    job_id: Annotated[str, msgspec.Meta(pattern=rf"\A{_JOB_ID}\Z")]
    state: JobState
    #: Wall-clock times: when it was made, and when it is deleted with its files.
    created_at: _Moment
    expires_at: _Moment
    #: The name of the API key that has made it, and what tells that key from others of this name; both empty where none
    #: is asked for. Nobody else sees the job.
    client: _Name = ""
    client_mark: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{32})?\Z")] = ""
    #: The hub that keeps it to itself, for lack of a job store; empty: any hub may work on it.
    hub: _Name = ""
    #: The hub that works on it, and the lease of that hub's key: it is the owner for as long as the key has that lease.
    owner: _Name = ""
    owner_lease: _Lease = 0
    #: How many times a hub has claimed it; the files of each claim have its number.
    claims: _Count = 0
    #: How many of its owners were lost.
    losses: _Count = 0
    started_at: _Moment = 0.0
    ended_at: _Moment = 0.0
    #: The name of the key with which its files are encrypted.
    secret: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]
    #: The claim whose file holds the answer, or the text of the error; 0: there is none.
    result: _Count = 0
    #: Why it failed.
    error: _Word = ""
    model: Annotated[str, msgspec.Meta(max_length=512)] = ""
    #: Length and size, as they were asked for; empty for the model's own.
    seconds: _Word = ""
    size: _Word = ""

    @property
    def has_ended(self) -> bool:
        """Whether nothing more happens to it."""
        return self.state in {JobState.COMPLETED, JobState.FAILED}


class JobProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The value of ``progress/<id>``, which ends with its hub's lease."""

    #: The claim that has come so far.
    claim: _Count
    percent: Annotated[int, msgspec.Meta(ge=0, le=100)]


def is_job_id(text: str) -> bool:
    """Whether a job can be called so; a name that passes is safe in a key and as a file's name."""
    return _is_job_id(text) is not None


def jobs_root(namespace: str) -> str:
    """The prefix of all that concerns the jobs of a namespace."""
    return f"{JOBS_ROOT}{check_namespace(namespace)}/"


def jobs_prefix(namespace: str) -> str:
    """The prefix of the records of jobs."""
    return f"{jobs_root(namespace)}jobs/"


def job_key(namespace: str, job_id: str) -> str:
    """The key of the record of one job."""
    return f"{jobs_prefix(namespace)}{job_id}"


def progress_key(namespace: str, job_id: str) -> str:
    """The leased key that says how far a job has come."""
    return f"{jobs_root(namespace)}progress/{job_id}"


def sweep_key(namespace: str) -> str:
    """The leased key of the hub that deletes expired jobs."""
    return f"{jobs_root(namespace)}sweep"


def encode_job(record: JobRecord | JobProgress) -> bytes:
    """The value for etcd."""
    return msgspec.json.encode(record)


def decode_job(item: KeyValue) -> JobRecord:
    """The record in a value of etcd. Raise RecordError if it is none, or another job's."""
    if len(item.value) > MOST_JOB_BYTES:
        raise RecordError(item.key, f"{len(item.value)} bytes are no record of a job")
    try:
        record = msgspec.json.decode(item.value, type=JobRecord)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise RecordError(item.key, str(error)) from error
    if record.job_id != item.key.rpartition("/")[2]:
        raise RecordError(item.key, f"holds the record of job {record.job_id}")
    return record


def decode_progress(value: bytes, claim: int) -> int:
    """How many per cent a value says of this claim; 0 for any other value."""
    try:
        found = msgspec.json.decode(value[:MOST_JOB_BYTES], type=JobProgress)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 0
    return found.percent if found.claim == claim else 0
