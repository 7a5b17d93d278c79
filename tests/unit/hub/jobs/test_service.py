"""Several hubs' jobs over one registry in memory and one folder: claims, losses, fences, sweeps, what clients see."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hub.jobs.cipher import JobKeys, job_key_of
from hub.jobs.errors import JobFileError, JobNotFoundError, JobStoreUnavailableError, JobsUnavailableError
from hub.jobs.files import JobFiles, SealedFile
from hub.jobs.folder import JobFolder
from hub.jobs.job import Client, JobBounds
from hub.jobs.registry import JobRegistry
from hub.jobs.service import JobService
from hub.jobs.work import MOST_TRIES, JobWork
from omni_discovery.clock import SystemClock
from omni_discovery.errors import (
    EngineFailedError,
    HubUnavailableError,
    InvalidRequestError,
    OverloadedError,
    RegistryUnavailableError,
    StageUnavailableError,
)
from omni_discovery.kv import Claim, Held, Listing
from omni_discovery.records import jobs as records
from omni_discovery.records import keys
from omni_discovery.records.jobs import JobRecord, JobState
from omni_discovery.testing import FakeKV, ManualClock

KEYS = JobKeys((job_key_of(b"\1" * 32),))
WORK = JobWork(inputs={"prompt": "a cat in the rain"}, params={0: {"num_frames": 4}}, timeout_s=60.0)
SPEED = 20.0
LIMIT_S = 30.0
NOBODY = Client()
ALICE, BOB, CAROL = (Client(name, name.encode() * 8) for name in ("alice", "bob", "carol"))
#: Another key by that name.
OTHER_ALICE = Client("alice", b"a" * 32)


class QuickClock(SystemClock):
    """Sleeps are short; ``ahead_s`` is how far its wall clock is ahead."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic_s(self) -> float:
        return time.monotonic() * SPEED

    def wall_s(self) -> float:
        return time.time() + self.ahead_s

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s / SPEED)

    async def wait(self, event: asyncio.Event, delay_s: float) -> None:
        await super().wait(event, delay_s / SPEED)


class SlyKV(FakeKV):
    """Loses the answers of writes that change a job, as often as it is told."""

    def __init__(self) -> None:
        super().__init__(ManualClock())
        self.unsure = 0

    async def compare_and_put(
        self, key: str, value: bytes, mod_revision: int, lease_id: int = 0, *, held: Held | None = None
    ) -> Claim:
        claim = await super().compare_and_put(key, value, mod_revision, lease_id, held=held)
        if self.unsure and claim.won:
            self.unsure -= 1
            raise RegistryUnavailableError("the answer was lost", may_have_run=True)
        return claim


class AwayStore(JobFolder):
    """Does not answer the next calls, as many as ``away``, to read or write files whose names end so."""

    def __init__(self, scene: Scene, ending: str, away: int) -> None:
        super().__init__(scene.place / "store", "team")
        self.ending, self.away = ending, away

    def write_sealed(self, job: JobRecord, part: str, sealed: Sequence[bytes]) -> None:
        self._answer(part)
        super().write_sealed(job, part, sealed)

    def open_sealed(self, job: JobRecord, part: str, most_bytes: int) -> SealedFile:
        self._answer(part)
        return super().open_sealed(job, part, most_bytes)

    def _answer(self, part: str) -> None:
        if self.away and part.endswith(self.ending):
            self.away -= 1
            error = JobStoreUnavailableError("the job store can't be reached")
            error.retry_after_s = 0.05
            raise error


class Hub:
    """One hub: its jobs, and what the test has made of the work that it was given."""

    def __init__(self, scene: Scene, name: str, **more: Any) -> None:
        self.scene, self.name = scene, name
        self.lease_id = 0
        #: The ids of the requests that have begun; they go on once ``go`` is set.
        self.begun: list[str] = []
        self.go = asyncio.Event()
        self.errors: list[Exception] = []
        self.stages = (1, 2)
        store = more.pop("store", None) or JobFolder(scene.place / "store", "team")
        self.jobs = JobService(
            JobRegistry(scene.kv, "team", name, lambda: self.lease_id),
            JobFiles(store, "team", more.pop("secrets", KEYS)),
            self._make,
            more.pop("bounds", JobBounds()),
            keeps=more.pop("keeps", False),
            stages_begun=lambda _request_id: self.stages,
            clock=scene.clock,
            **more,
        )

    async def register(self) -> None:
        self.lease_id = (await self.scene.kv.grant(60.0)).lease_id
        await self.scene.kv.put(keys.hub_key("team", self.name), b"{}", self.lease_id)

    async def _make(self, work: JobWork, request_id: str, key: str) -> bytes:
        self.begun.append(request_id)
        await self.go.wait()
        if self.errors:
            raise self.errors.pop(0)
        return f"{work.inputs['prompt']} by {self.name}".encode()

    async def ask(self, client: Client = NOBODY) -> str:
        return (await self.jobs.create(WORK, client, "model", "4", "")).job_id


async def mine(hub: Hub, client: Client) -> list[JobRecord]:
    found, has_more = await hub.jobs.page(client, 1000, newest_first=False)
    assert not has_more
    return found


class Scene:
    def __init__(self, place: Path) -> None:
        self.place, self.kv, self.clock = place, SlyKV(), QuickClock()
        self.hubs: list[Hub] = []

    async def hub(self, name: str, **more: Any) -> Hub:
        hub = Hub(self, name, **more)
        await hub.register()
        hub.jobs.start()
        self.hubs.append(hub)
        return hub

    async def record(self, job_id: str) -> JobRecord | None:
        item = await self.kv.get(records.job_key("team", job_id))
        return None if item is None else records.decode_job(item)

    async def is_at(self, job_id: str, *states: JobState) -> JobRecord:
        async def probe() -> JobRecord | None:
            record = await self.record(job_id)
            return record if record is not None and record.state in states else None

        found: JobRecord = await until(probe)
        return found

    @property
    def files(self) -> set[str]:
        return {path.name.partition(".")[2] for path in (self.place / "store" / "team").iterdir()}


async def until(probe: Callable[[], Any]) -> Any:
    """The first truthy value of the probe, which may be a coroutine."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            found = probe()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(0.01)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    made = Scene(tmp_path)
    yield made
    for hub in made.hubs:
        hub.go.set()
        await hub.jobs.close()


async def content_of(hub: Hub, job_id: str, client: Client = NOBODY) -> bytes:
    length, pieces = await hub.jobs.content(await hub.jobs.find(job_id, client))
    found = b"".join([piece async for piece in pieces])
    assert len(found) == length
    return found


DONE = (JobState.COMPLETED, JobState.FAILED)


async def test_a_job_made_at_one_hub_is_seen_and_fetched_at_any(scene: Scene) -> None:
    one, two = await scene.hub("one"), await scene.hub("two")
    job_id = await one.ask(ALICE)
    await until(lambda: one.begun or two.begun)
    shown = await two.jobs.find(job_id, ALICE)
    assert (shown.state, shown.client, shown.model, shown.seconds) == (JobState.IN_PROGRESS, "alice", "model", "4")
    for hub in (one, two):
        hub.go.set()
    await scene.is_at(job_id, JobState.COMPLETED)
    for hub in (one, two):
        assert (await content_of(hub, job_id, ALICE)).startswith(b"a cat in the rain by ")
        assert await hub.jobs.percent(await hub.jobs.find(job_id, ALICE)) == 100
    assert len(one.begun + two.begun) == 1


async def test_a_job_whose_hub_is_gone_is_done_by_another_and_told_once(scene: Scene) -> None:
    """1. hub one works on a job; its lease ends, and hub two claims the job and ends it
    2. hub one, which was frozen all the while, has made the video, too: its own is thrown away
    """
    one = await scene.hub("one")
    job_id = await one.ask()
    await until(lambda: one.begun)
    two = await scene.hub("two")
    two.go.set()
    # What the hub does by itself stands still, as it would in a frozen process; its work does not.
    assert one.jobs._task is not None
    one.jobs._task.cancel()
    scene.kv.end_lease(one.lease_id)
    record = await scene.is_at(job_id, *DONE)
    assert (record.state, record.claims, record.losses, record.result) == (JobState.COMPLETED, 2, 1, 2)
    before = await scene.kv.get(records.job_key("team", job_id))
    one.go.set()
    await until(lambda: not one.jobs._runs)
    assert await scene.kv.get(records.job_key("team", job_id)) == before
    assert await content_of(one, job_id) == b"a cat in the rain by two"
    assert scene.files == {"request", "2.video"}


async def test_a_hub_without_a_lease_tells_nothing_until_it_has_one(scene: Scene) -> None:
    """No other hub is there: what it has made is told once its key has a lease again."""
    one = await scene.hub("one")
    job_id = await one.ask()
    await until(lambda: one.begun)
    scene.kv.end_lease(one.lease_id)
    one.go.set()
    await until(lambda: "1.video" in scene.files)
    await asyncio.sleep(0.2)
    found = await scene.record(job_id)
    assert found is not None
    assert found.state is JobState.IN_PROGRESS
    await one.register()
    record = await scene.is_at(job_id, *DONE)
    assert (record.state, record.claims) == (JobState.COMPLETED, 1)


async def test_a_hub_stays_the_owner_under_its_next_lease(scene: Scene) -> None:
    one = await scene.hub("one")
    job_id = await one.ask()
    await until(lambda: one.begun)
    scene.kv.end_lease(one.lease_id)
    await one.register()

    async def is_kept() -> bool:
        record = await scene.record(job_id)
        return record is not None and record.owner_lease == one.lease_id

    await until(is_kept)
    two = await scene.hub("two")
    one.go.set()
    record = await scene.is_at(job_id, *DONE)
    assert (record.claims, two.begun) == (1, [])


async def test_an_answer_of_etcd_that_is_lost_changes_nothing(scene: Scene) -> None:
    """The write of the end took effect: the hub finds its own word there, and keeps the file."""
    one = await scene.hub("one")
    job_id = await one.ask()
    await until(lambda: one.begun)
    scene.kv.unsure = 1
    one.go.set()
    await scene.is_at(job_id, JobState.COMPLETED)
    await until(lambda: not one.jobs._runs)
    assert await content_of(one, job_id) == b"a cat in the rain by one"


async def test_a_hub_that_stops_gives_its_jobs_to_another(scene: Scene) -> None:
    one = await scene.hub("one")
    job_id = await one.ask()
    await until(lambda: one.begun)
    two = await scene.hub("two")
    await one.jobs.close()
    two.go.set()
    record = await scene.is_at(job_id, *DONE)
    assert (record.claims, record.losses, record.state) == (2, 0, JobState.COMPLETED)
    with pytest.raises(HubUnavailableError):
        await one.ask()


async def test_a_job_that_is_deleted_stops_wherever_it_runs(scene: Scene) -> None:
    one = await scene.hub("one")
    job_id = await one.ask(ALICE)
    await until(lambda: one.begun)
    two = await scene.hub("two")
    await two.jobs.delete(job_id, ALICE)
    await until(lambda: not one.jobs._runs)
    assert scene.files == set()
    assert await scene.record(job_id) is None
    with pytest.raises(JobNotFoundError):
        await one.jobs.find(job_id, ALICE)


@pytest.mark.attack("J6")
@pytest.mark.attack("M9")
async def test_the_jobs_of_another_key_are_not_there(scene: Scene) -> None:
    one = await scene.hub("one")
    one.go.set()
    job_id = await one.ask(ALICE)
    await scene.is_at(job_id, JobState.COMPLETED)
    for client in (BOB, NOBODY, OTHER_ALICE):
        assert await mine(one, client) == []
        with pytest.raises(JobNotFoundError, match="not yours"):
            await one.jobs.find(job_id, client)
        with pytest.raises(JobNotFoundError):
            await one.jobs.delete(job_id, client)
    assert [job.job_id for job in await mine(one, ALICE)] == [job_id]


async def test_what_fails_has_its_reason_in_the_store_and_not_in_etcd(scene: Scene) -> None:
    one = await scene.hub("one")
    one.errors.append(EngineFailedError("it choked on 'a cat in the rain'"))
    one.go.set()
    job_id = await one.ask()
    record = await scene.is_at(job_id, *DONE)
    assert (record.state, record.error) == (JobState.FAILED, "engine_failed")
    assert await one.jobs.error_text(record) == "it choked on 'a cat in the rain'"
    for prefix in ("/omni/v1-jobs/", "/omni/v1/"):
        for item in (await scene.kv.list(prefix)).items:
            assert b"rain" not in item.value


async def test_a_stage_without_a_place_is_asked_again(scene: Scene) -> None:
    one = await scene.hub("one")
    one.errors += [StageUnavailableError(0, "nobody"), OverloadedError("full", 1.0)]
    one.go.set()
    record = await scene.is_at(await one.ask(), *DONE)
    assert (record.state, len(one.begun)) == (JobState.COMPLETED, 3)


async def test_a_hub_that_can_not_serve_leaves_the_job_to_others(scene: Scene) -> None:
    one = await scene.hub("one")
    one.errors.append(HubUnavailableError(0, "this hub is revoked"))
    job_id = await one.ask()
    await until(lambda: one.begun)
    two = await scene.hub("two", can_serve=lambda: True)
    two.go.set()
    one.jobs._can_serve = lambda: False
    one.go.set()
    await scene.is_at(job_id, JobState.COMPLETED)
    assert await content_of(two, job_id) == b"a cat in the rain by two"


async def test_a_job_whose_request_is_gone_or_changed_fails(scene: Scene) -> None:
    one = await scene.hub("one", can_serve=lambda: False)
    job_id = await one.ask()
    path = scene.place / "store" / "team" / f"{job_id}.request"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    one.jobs._can_serve = lambda: True
    record = await scene.is_at(job_id, *DONE)
    assert (record.state, record.error) == (JobState.FAILED, "job_store_failed")
    assert "was changed" in await one.jobs.error_text(record)
    assert one.begun == []


async def test_a_video_that_can_not_be_read_is_an_error_before_its_first_byte(scene: Scene) -> None:
    one = await scene.hub("one")
    one.go.set()
    job_id = await one.ask()
    record = await scene.is_at(job_id, JobState.COMPLETED)
    (scene.place / "store" / "team" / f"{job_id}.1.video").write_bytes(b"OMJ1" + bytes(40))
    with pytest.raises(JobFileError, match="was changed"):
        await one.jobs.content(record)


@pytest.mark.parametrize("ending", ["request", "video"])
async def test_a_job_waits_for_a_store_that_is_away(scene: Scene, ending: str) -> None:
    """By the rule of requests whose stages have no place: with growing pauses, and the video is not made again."""
    asking = await scene.hub("asking", can_serve=lambda: False)
    one = await scene.hub("one", store=AwayStore(scene, ending, away=3))
    one.go.set()
    record = await scene.is_at(await asking.ask(), *DONE)
    assert (record.state, record.claims, len(one.begun)) == (JobState.COMPLETED, 1, 1)
    assert await content_of(asking, record.job_id) == b"a cat in the rain by one"


async def test_a_job_whose_store_stays_away_fails_and_another_hub_says_why(scene: Scene) -> None:
    """Its error's text is written once more at its end: here the store is back by then."""
    asking = await scene.hub("asking", can_serve=lambda: False)
    one = await scene.hub("one", store=AwayStore(scene, "video", away=MOST_TRIES))
    one.go.set()
    record = await scene.is_at(await asking.ask(), *DONE)
    assert (record.state, record.error) == (JobState.FAILED, "job_store_failed")
    assert await asking.jobs.error_text(record) == "the job store can't be reached"


async def test_clients_are_told_that_the_store_is_away_and_keep_their_jobs(scene: Scene) -> None:
    """1. a new job is refused, and there is none; 2. what is completed stays; its file can be had once it is back"""
    store = AwayStore(scene, "", away=1)
    one = await scene.hub("one", store=store)
    one.go.set()
    with pytest.raises(JobStoreUnavailableError):
        await one.ask()
    assert await mine(one, NOBODY) == []
    record = await scene.is_at(await one.ask(), JobState.COMPLETED)
    store.away = 1
    with pytest.raises(JobStoreUnavailableError):
        await one.jobs.content(record)
    assert await content_of(one, record.job_id) == b"a cat in the rain by one"


async def test_a_hub_does_not_claim_what_it_has_no_key_for(scene: Scene) -> None:
    other = JobKeys((job_key_of(b"\2" * 32),))
    one = await scene.hub("one", secrets=other)
    one.go.set()
    theirs = Hub(scene, "two")
    job_id = await theirs.ask()
    await asyncio.sleep(0.3)
    found = await scene.record(job_id)
    assert found is not None
    assert (found.state, one.begun) == (JobState.QUEUED, [])
    await theirs.register()
    theirs.jobs.start()
    theirs.go.set()
    scene.hubs.append(theirs)
    await scene.is_at(job_id, JobState.COMPLETED)


async def test_one_hub_works_on_eight_jobs_at_a_time(scene: Scene) -> None:
    one = await scene.hub("one")
    ids = [await one.ask() for _ in range(10)]
    await until(lambda: len(one.begun) == 8)
    await asyncio.sleep(0.2)
    assert sorted(each.partition("-")[0] for each in one.begun) == sorted(ids[:8])
    one.go.set()
    for job_id in ids:
        await scene.is_at(job_id, JobState.COMPLETED)


async def test_progress_is_told_and_ends_with_the_job(scene: Scene) -> None:
    one, two = await scene.hub("one", can_serve=lambda: True), Hub(scene, "two")
    job_id = await one.ask()
    one.stages = (2, 4)
    await until(lambda: one.begun)

    async def percent() -> int:
        return await two.jobs.percent(await two.jobs.find(job_id, NOBODY))

    assert await until(percent) == 25
    item = await scene.kv.get(records.progress_key("team", job_id))
    assert item is not None
    assert item.lease_id == one.lease_id
    one.go.set()
    await scene.is_at(job_id, JobState.COMPLETED)
    await until(lambda: not one.jobs._runs)
    assert await scene.kv.get(records.progress_key("team", job_id)) is None


async def test_old_jobs_go_with_their_files_and_made_up_ones_go_too(scene: Scene) -> None:
    one, two = await scene.hub("one"), await scene.hub("two")
    one.go.set()
    two.go.set()
    job_id = await one.ask()
    await scene.is_at(job_id, JobState.COMPLETED)
    kept = f"video_{9:032x}"
    made_up = JobRecord(
        job_id=kept, state=JobState.COMPLETED, created_at=1.0, expires_at=9e10, secret="0" * 16, result=1
    )
    await scene.kv.put(records.job_key("team", kept), records.encode_job(made_up))
    scene.clock.ahead_s = 90_000.0

    async def is_gone() -> bool:
        return not (await scene.kv.list(records.jobs_prefix("team"))).items

    await until(is_gone)
    await until(lambda: not scene.files)
    sweeper = await scene.kv.get(records.sweep_key("team"))
    assert sweeper is not None
    assert sweeper.lease_id in {one.lease_id, two.lease_id}


@pytest.mark.attack("J5")
async def test_values_that_are_no_records_change_nothing(scene: Scene) -> None:
    for number, value in enumerate((b"", b"{}", b"[" * 3000, b"x" * 20_000, msgspec.json.encode({"job_id": 1}))):
        await scene.kv.put(records.job_key("team", f"video_{number:032x}"), value)
    await scene.kv.put(records.job_key("team", "../../hubs/one"), b"{}")
    one = await scene.hub("one")
    one.go.set()
    job_id = await one.ask()
    await scene.is_at(job_id, JobState.COMPLETED)
    assert [job.job_id for job in await mine(one, NOBODY)] == [job_id]
    with pytest.raises(JobNotFoundError):
        await one.jobs.find(f"video_{1:032x}", NOBODY)


async def test_there_is_no_room_for_more_than_the_bounds(scene: Scene) -> None:
    one = await scene.hub("one", bounds=JobBounds(most=3, most_per_client=2))
    for _ in range(2):
        await one.ask(ALICE)
    with pytest.raises(OverloadedError, match="kept of this key"):
        await one.ask(ALICE)
    await one.ask(BOB)
    with pytest.raises(OverloadedError, match="3 videos are kept here"):
        await one.ask(CAROL)
    assert len([name for name in scene.files if name == "request"]) == 1


@pytest.mark.attack("M7")
async def test_many_that_come_at_once_get_no_more_places_than_there_are(scene: Scene) -> None:
    """1. thirty at once to one hub, of a client who may have four: four get one
    2. as many to two hubs at once, of another client: four again, whichever hub was asked; the others leave nothing
    """
    bounds = JobBounds(most=10, most_per_client=4)
    one, two = await scene.hub("one", bounds=bounds), await scene.hub("two", bounds=bounds)
    came = await asyncio.gather(*(one.ask(ALICE) for _ in range(30)), return_exceptions=True)
    assert sum(isinstance(each, str) for each in came) == 4
    came = await asyncio.gather(*(hub.ask(BOB) for _ in range(15) for hub in (one, two)), return_exceptions=True)
    ids = [each for each in came if isinstance(each, str)]
    assert len(ids) == 4
    assert sorted(job.job_id for job in await mine(two, BOB)) == sorted(ids)
    assert {type(each) for each in came} == {str, OverloadedError}
    assert len(list((scene.place / "store" / "team").glob("*.request"))) == 8


async def test_without_etcd_nothing_is_known_and_what_runs_is_told_later(scene: Scene) -> None:
    one = await scene.hub("one")
    job_id = await one.ask()
    await until(lambda: one.begun)
    scene.kv.is_out = True
    for asked in (one.ask(), one.jobs.find(job_id, NOBODY), mine(one, NOBODY), one.jobs.delete(job_id, NOBODY)):
        with pytest.raises(JobsUnavailableError, match="does not answer this hub now"):
            await asked
    one.go.set()
    await until(lambda: "1.video" in scene.files)
    scene.kv.is_out = False
    await scene.is_at(job_id, JobState.COMPLETED)


@asynccontextmanager
async def keeping(scene: Scene, name: str) -> AsyncIterator[Hub]:
    secrets = JobKeys((job_key_of(name[:1].encode() * 32),))
    hub = await scene.hub(name, keeps=True, store=JobFolder(scene.place / name, "team"), secrets=secrets)
    hub.go.set()
    yield hub


async def test_a_hub_without_a_store_keeps_its_jobs_and_others_say_whose_they_are(scene: Scene) -> None:
    """1. another hub names the one that has it, and never claims it
    2. the hub stops: its jobs are gone, and their files
    """
    async with keeping(scene, "one") as one, keeping(scene, "two") as two:
        job_id = await one.ask()
        record = await scene.is_at(job_id, JobState.COMPLETED)
        assert (record.hub, await content_of(one, job_id)) == ("one", b"a cat in the rain by one")
        with pytest.raises(JobNotFoundError, match="hub one keeps it to itself, for it has no --job-store"):
            await two.jobs.find(job_id, NOBODY)
        assert await mine(two, NOBODY) == []
        await one.jobs.close()
        assert await scene.record(job_id) is None
        assert list((scene.place / "one" / "team").iterdir()) == []


async def test_what_a_lost_hub_has_kept_to_itself_is_deleted(scene: Scene) -> None:
    """By another hub's sweep, and by the next life of the same hub."""
    gone = Hub(scene, "gone", keeps=True)
    await gone.register()
    before = Hub(scene, "one", keeps=True)
    await before.register()
    ids = [await gone.ask(), await before.ask()]
    scene.kv.end_lease(gone.lease_id)
    async with keeping(scene, "one"):

        async def are_gone() -> bool:
            return [await scene.record(job_id) for job_id in ids] == [None, None]

        await until(are_gone)


class CountedKV(SlyKV):
    """Counts what is read of a prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.listed: list[str] = []

    async def list(self, prefix: str, *, keys_only: bool = False) -> Listing:
        self.listed.append(prefix)
        return await super().list(prefix, keys_only=keys_only)


def made(number: int, client: Client, files: JobFiles, **more: Any) -> JobRecord:
    """One of several jobs, the older the smaller its number; two are made in each second."""
    return JobRecord(
        job_id=f"video_{number:032x}", state=JobState.COMPLETED, created_at=1e9 + number // 2, expires_at=4e9,
        client=client.name, client_mark=files.mark_of(files.secret, client) or "", secret=files.secret, **more,
    )  # fmt: skip


@pytest.mark.attack("Q66")
async def test_pages_of_videos_are_each_clients_own_in_order_and_the_records_read_once_a_change(tmp_path: Path) -> None:
    """1. 600 records, every third Alice's, one of hers kept by another hub, one of another key by her name
    2. each page of hers, in both directions, by the end of the one before; Bob can't begin behind one of hers
    3. all that reads the records once, however many ask at once; a new record shows at once
    """
    kv = CountedKV()
    registry = JobRegistry(kv, "team", "one", lambda: 0)
    files = JobFiles(JobFolder(tmp_path / "store", "team"), "team", KEYS)
    jobs = JobService(registry, files, None, JobBounds(), keeps=False, stages_begun=lambda _: (0, 1))  # type: ignore[arg-type]
    for number in range(600):
        await registry.create_job(made(number, (ALICE, BOB, CAROL)[number % 3], files))
    await registry.create_job(made(601, ALICE, files, hub="other"))
    await registry.create_job(made(602, OTHER_ALICE, files))
    hers = [f"video_{number:032x}" for number in range(0, 600, 3)]
    kv.listed.clear()
    for newest_first, expected in ((False, hers), (True, hers[::-1])):
        shown: list[str] = []
        has_more, after = True, None
        while has_more:
            page, has_more = await jobs.page(ALICE, 30, newest_first=newest_first, after=after)
            shown += [job.job_id for job in page]
            after = shown[-1]
        assert shown == expected
    with pytest.raises(InvalidRequestError, match="no video"):
        await jobs.page(BOB, 30, newest_first=True, after=hers[7])
    await asyncio.gather(*(jobs.page(ALICE, 30, newest_first=True) for _ in range(100)))
    assert kv.listed == [records.jobs_prefix("team")]
    await registry.create_job(made(603, ALICE, files))
    ((newest,), _) = await jobs.page(ALICE, 1, newest_first=True)
    assert newest.job_id == f"video_{603:032x}"
    assert await registry.delete_job(newest.job_id, lambda _: True)
    ((newest,), _) = await jobs.page(ALICE, 1, newest_first=True)
    assert newest.job_id == hers[-1]
