"""The records of jobs: their bytes, what is no record, and the names that are safe."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_discovery.errors import ConfigError, RecordError
from omni_discovery.kv import KeyValue
from omni_discovery.records import jobs

ID = f"video_{7:032x}"
RECORD = jobs.JobRecord(
    job_id=ID,
    state=jobs.JobState.IN_PROGRESS,
    created_at=1000.0,
    expires_at=2000.0,
    client="alice",
    owner="hub-1",
    owner_lease=77,
    claims=2,
    losses=1,
    started_at=1001.5,
    secret="0123456789abcdef",
    model="wan",
    seconds="4",
    size="64x32",
)


def item_of(value: bytes, job_id: str = ID) -> KeyValue:
    return KeyValue(jobs.job_key("default", job_id), value, 5, 9)


def changed(**fields: object) -> bytes:
    return msgspec.json.encode({**msgspec.to_builtins(RECORD), **fields})


def test_the_bytes_of_a_record_stay_what_they_are() -> None:
    """Fields that say nothing are absent, so that a later release may add some."""
    assert jobs.encode_job(RECORD) == (
        b'{"job_id":"video_00000000000000000000000000000007","state":"in_progress","created_at":1000.0,'
        b'"expires_at":2000.0,"client":"alice","owner":"hub-1","owner_lease":77,"claims":2,"losses":1,'
        b'"started_at":1001.5,"secret":"0123456789abcdef","model":"wan","seconds":"4","size":"64x32"}'
    )
    assert jobs.decode_job(item_of(jobs.encode_job(RECORD))) == RECORD
    assert jobs.decode_job(item_of(changed(from_a_later_release=[1]))) == RECORD


def test_jobs_lie_beside_what_hubs_watch() -> None:
    assert jobs.job_key("team-a", ID) == f"/omni/v1-jobs/team-a/jobs/{ID}"
    assert jobs.progress_key("team-a", ID) == f"/omni/v1-jobs/team-a/progress/{ID}"
    assert jobs.sweep_key("team-a") == "/omni/v1-jobs/team-a/sweep"
    with pytest.raises(ConfigError):
        jobs.jobs_root("../v1/other")


@pytest.mark.attack("J5")
@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"[]",
        b"\xff\xfe",
        b"[" * 5000,
        changed(state="done"),
        changed(job_id=f"video_{8:032x}"),
        changed(job_id="video_../../etc/passwd"),
        changed(owner="a/b"),
        changed(owner="\u202ehub"),
        changed(client="x" * 64),
        changed(claims=-1),
        changed(claims=1 << 40),
        changed(result=1.5),
        changed(secret="../../key"),
        changed(error="ENGINE\n"),
        changed(size="x" * 41),
        changed(created_at=float(10**15)),
        changed(more="x" * jobs.MOST_JOB_BYTES),
    ],
    ids=lambda value: repr(value[:40]),
)
def test_what_is_no_record_of_this_job_is_refused(value: bytes) -> None:
    with pytest.raises(RecordError):
        jobs.decode_job(item_of(value))


@given(st.binary(max_size=300) | st.text(max_size=100).map(str.encode))
def test_any_bytes_are_a_record_or_refused(value: bytes) -> None:
    try:
        jobs.decode_job(item_of(value))
    except RecordError:
        return
    raise AssertionError("random bytes are no record")


@pytest.mark.parametrize(
    "text", ["", "video_", ID.upper(), ID + "\n", ID + "/..", "../" + ID, "image_" + ID[6:], ID[:-1]]
)
def test_only_whole_ids_are_ids(text: str) -> None:
    assert jobs.is_job_id(ID)
    assert not jobs.is_job_id(text)


def test_progress_counts_for_the_claim_that_it_names_alone() -> None:
    value = jobs.encode_job(jobs.JobProgress(claim=2, percent=50))
    assert (jobs.decode_progress(value, 2), jobs.decode_progress(value, 3)) == (50, 0)
    assert [jobs.decode_progress(each, 2) for each in (b"", b'{"claim":2,"percent":101}', b"[" * 9000)] == [0, 0, 0]
