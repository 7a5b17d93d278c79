"""The names of a Mooncake store's objects, and what the first object of a file says."""

from __future__ import annotations

import re

import pytest

from hub.jobs.cipher import JobKeys, job_key_of
from hub.jobs.errors import JobFileError
from hub.jobs.mooncake.names import (
    MOST_OBJECT_BYTES,
    SLICE_BYTES,
    Head,
    decode_head,
    encode_head,
    file_prefix,
    head_names,
    job_prefix,
    orphans_pattern,
    pattern_of,
    slice_name,
    slices_of,
)
from tests.support.filming import record_of

KEYS = JobKeys((job_key_of(b"\1" * 32),))
NOW_S = 100 * 3600.0 + 1
ID = f"video_{1:032x}"
TOKEN = "0123456789abcdef"


def name_at(hour: int, namespace: str = "team.a") -> str:
    return head_names(file_prefix(namespace, record_of(ID, KEYS, hour * 3600.0 + 5), "request"))[0]


def test_the_names_of_a_file_have_namespace_hour_job_and_part() -> None:
    prefix = file_prefix("team.a", record_of(ID, KEYS, 7201.5), "2.video")
    assert prefix == f"omni-jobs/team.a/2/{ID}.2.video/"
    assert head_names(prefix)[::7] == [f"{prefix}0", f"{prefix}7"]
    assert slice_name(prefix, TOKEN, 3) == f"{prefix}{TOKEN}-3"


def test_a_pattern_hits_what_begins_so_and_no_neighbour() -> None:
    job, other = record_of(ID, KEYS), record_of(f"video_{2:032x}", KEYS)
    found = re.compile(pattern_of(file_prefix("team.a", job, "1.video")))
    assert found.search(file_prefix("team.a", job, "1.video") + "0")
    for name in (
        file_prefix("team.a", job, "11.video"),
        file_prefix("team.a", other, "1.video"),
        file_prefix("team-a", job, "1.video"),
        "x" + file_prefix("team.a", job, "1.video"),
    ):
        assert not found.search(name + "0")
    assert re.search(pattern_of(job_prefix("team.a", job)), file_prefix("team.a", job, "11.video"))


def test_orphans_are_of_old_hours_without_a_known_job_in_one_namespace() -> None:
    known = [record_of(ID, KEYS, 90 * 3600.0)]
    found = re.compile(orphans_pattern("team.a", known, NOW_S))
    gone = {hour for hour in range(1, 110) if found.search(name_at(hour))}
    assert gone == {*range(1, 98), *range(103, 110)} - {90}
    assert not found.search(name_at(1, "team-a"))
    assert not found.search(name_at(1, "team.a.b"))


def test_a_month_of_hours_is_an_expression_that_a_master_takes() -> None:
    """Mooncake's takes 2000 names of jobs, and not 3000."""
    known = [record_of(ID, KEYS, NOW_S + hour * 3600.0) for hour in range(-24 * 31, 24)]
    assert len(orphans_pattern("n" * 63, known, 500_000 * 3600.0)) < 2000 * len(ID)


def test_a_head_is_read_as_it_was_written_and_fits_into_an_object() -> None:
    for size_bytes in (0, 5, SLICE_BYTES, 80 << 20):
        head = Head(size_bytes, TOKEN, bytes(min(size_bytes, SLICE_BYTES)))
        assert decode_head(encode_head(head), 80 << 20) == head
        assert len(encode_head(head)) <= MOST_OBJECT_BYTES
    assert [slices_of(size) for size in (0, 1, SLICE_BYTES, SLICE_BYTES + 1)] == [1, 1, 1, 2]


@pytest.mark.attack("J4")
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x",
        encode_head(Head(101, TOKEN, bytes(101))),
        encode_head(Head(50, TOKEN, bytes(49))),
        encode_head(Head(5, "../" + TOKEN[3:], bytes(5))),
        b"\x91" * 2000,
    ],
    ids=["nothing", "noise", "too long", "cut", "a token that is none", "deep"],
)
def test_a_head_that_no_hub_has_written_is_refused(content: bytes) -> None:
    with pytest.raises(JobFileError, match="none that a hub has written"):
        decode_head(content, 100)
