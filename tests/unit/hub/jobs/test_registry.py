"""The records of jobs in a registry in memory: changes that meet others, and what a hub may write without its lease."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from hub.jobs import registry as registry_module
from hub.jobs.job import HubAtWork
from hub.jobs.registry import JobRegistry, unavailable
from omni_discovery.errors import LeaseNotFoundError, RecordError, RegistryDeniedError, RegistryUnavailableError
from omni_discovery.kv import Claim, Held
from omni_discovery.records import jobs as records
from omni_discovery.records import keys
from omni_discovery.records.jobs import JobRecord, JobState
from omni_discovery.testing import FakeKV, ManualClock

JOB = JobRecord(job_id=f"video_{1:032x}", state=JobState.QUEUED, created_at=1.0, expires_at=9e9, secret="0" * 16)
KEY = records.job_key("team", JOB.job_id)


class RacingKV(FakeKV):
    """Lets another write a job between the read and the write of a change, so often."""

    races: list[Callable[[], bytes | None]]

    def __init__(self) -> None:
        super().__init__(ManualClock())
        self.races = []

    async def compare_and_put(
        self, key: str, value: bytes, mod_revision: int, lease_id: int = 0, *, held: Held | None = None
    ) -> Claim:
        if self.races and key == KEY:
            theirs = self.races.pop(0)()
            if theirs is None:
                await self.delete(KEY)
            else:
                await self.put(KEY, theirs)
        return await super().compare_and_put(key, value, mod_revision, lease_id, held=held)


async def scene_of() -> tuple[RacingKV, JobRegistry, int]:
    kv = RacingKV()
    lease_id = (await kv.grant(60.0)).lease_id
    await kv.put(keys.hub_key("team", "one"), b"{}", lease_id)
    registry = JobRegistry(kv, "team", "one", lambda: lease_id)
    assert await registry.create_job(JOB)
    assert not await registry.create_job(JOB)
    return kv, registry, lease_id


def sized(job: JobRecord, _hub: HubAtWork) -> JobRecord | None:
    """Change what has not ended."""
    return None if job.has_ended else replace(job, size="1x1")


async def test_a_change_that_another_was_faster_than_is_asked_again() -> None:
    """1. another has written the model meanwhile: both changes are there
    2. another has ended the job meanwhile: nothing is written over that
    """
    kv, registry, _ = await scene_of()
    kv.races = [lambda: records.encode_job(replace(JOB, model="theirs"))]
    changed = await registry.change_job(JOB.job_id, sized)
    assert changed == replace(JOB, model="theirs", size="1x1") == await registry.read_job(JOB.job_id)
    over = replace(JOB, state=JobState.COMPLETED, result=7)
    kv.races = [lambda: records.encode_job(over)]
    assert await registry.change_job(JOB.job_id, sized) is None
    assert await registry.read_job(JOB.job_id) == over


async def test_a_job_that_was_deleted_meanwhile_is_not_written_again() -> None:
    kv, registry, _ = await scene_of()
    kv.races = [lambda: None]
    assert await registry.change_job(JOB.job_id, sized) is None
    assert await registry.read_job(JOB.job_id) is None


async def test_a_hub_writes_only_while_its_key_has_the_lease_that_it_believes_in() -> None:
    """Not after the lease has ended, not under a lease that another life of the hub has, and not without any."""
    kv, registry, lease_id = await scene_of()
    before = await kv.get(KEY)
    kv.end_lease(lease_id)
    with pytest.raises(LeaseNotFoundError):
        await registry.change_job(JOB.job_id, sized)
    await kv.put(keys.hub_key("team", "one"), b"{}", (await kv.grant(60.0)).lease_id)
    with pytest.raises(LeaseNotFoundError):
        await registry.change_job(JOB.job_id, sized)
    without = JobRegistry(kv, "team", "one", lambda: 0)
    with pytest.raises(LeaseNotFoundError):
        await without.change_job(JOB.job_id, sized)
    await without.write_progress(JOB.job_id, 1, 50)
    assert not await without.claim_sweep()
    assert await kv.get(KEY) == before
    assert await kv.get(records.progress_key("team", JOB.job_id)) is None


async def test_what_has_not_changed_has_the_same_marks() -> None:
    kv, registry, lease_id = await scene_of()
    before = await registry.marks()
    await registry.write_progress(JOB.job_id, 1, 50)
    assert await registry.marks() == before
    assert await registry.change_job(JOB.job_id, sized) is not None
    changed = await registry.marks()
    assert changed != before
    kv.end_lease(lease_id)
    assert await registry.marks() != changed


async def test_one_hub_at_a_time_sweeps() -> None:
    kv, registry, lease_id = await scene_of()
    other = (await kv.grant(60.0)).lease_id
    await kv.put(keys.hub_key("team", "two"), b"{}", other)
    two = JobRegistry(kv, "team", "two", lambda: other)
    assert [await registry.claim_sweep(), await two.claim_sweep(), await registry.claim_sweep()] == [True, False, True]
    kv.end_lease(lease_id)
    assert await two.claim_sweep()


def test_a_client_is_told_what_can_be_done_and_no_address() -> None:
    told = unavailable(RegistryUnavailableError("10.0.0.7:2379 refuses"))
    assert "10.0.0.7" not in str(told)
    assert told.retry_after_s
    assert "omni etcd grant-role" in str(unavailable(RegistryDeniedError("no")))


@pytest.mark.attack("M8")
async def test_a_record_that_could_not_be_read_again_is_not_written(caplog: pytest.LogCaptureFixture) -> None:
    """1. nothing is written; 2. of many such records of others, one line names the first and how many there are"""
    kv, registry, _lease_id = await scene_of()
    with pytest.raises(RecordError, match="seconds"):
        await registry.create_job(replace(JOB, job_id=f"video_{2:032x}", seconds="4\n"))
    assert await registry.read_records() == (JOB,)
    for number in range(3, 8):
        bad = replace(JOB, job_id=f"video_{number:032x}", size="1x1\n")
        await kv.put(records.job_key("team", bad.job_id), records.encode_job(bad))
    for _ in range(3):
        assert await registry.read_records() == (JOB,)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "hub.jobs.registry"]
    assert f"key={records.job_key('team', f'video_{3:032x}')} count=5 " in line


@pytest.mark.attack("V7")
async def test_of_too_many_records_the_first_are_read_and_others_have_their_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every hub may write any number of them, and every hub reads them all on the loop that serves requests."""
    monkeypatch.setattr(registry_module, "MOST_READ", 3000)
    kv, registry, lease_id = await scene_of()
    for number in range(2, 4002):
        job = replace(JOB, job_id=f"video_{number:032x}")
        await kv.put(records.job_key("team", job.job_id), records.encode_job(job))
        await kv.put(keys.hub_key("team", f"hub-{number}"), b"{}", lease_id)
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    jobs = await registry.read_all()
    counting.cancel()
    assert len(jobs.records) == 3000
    assert jobs.records[0] == JOB
    assert len(jobs.live) == 4001
    assert turns > 10
