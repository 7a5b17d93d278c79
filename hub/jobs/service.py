"""JobService: the jobs of one hub: makes, claims and runs them, tells how far they are, and deletes old ones."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, Final, TypeVar

from hub.jobs import job as life
from hub.jobs.errors import JobFileError, JobNotFoundError, JobStoreUnavailableError
from hub.jobs.files import REQUEST, JobFiles, error_of_claim, video_of
from hub.jobs.registry import Jobs, Marks, unavailable
from hub.jobs.work import (
    CLIENTS_FAULT,
    JobWork,
    code_of,
    decode_work,
    encode_work,
    is_of_this_hub,
    pause_before_retry_s,
)
from omni_discovery.backoff import Backoff, wait_for_event
from omni_discovery.clock import Clock, SystemClock
from omni_discovery.errors import HubUnavailableError, InvalidRequestError, OmniError, OverloadedError, RegistryError
from omni_discovery.records.jobs import JobRecord, JobState, is_job_id

if TYPE_CHECKING:
    from hub.jobs.registry import JobRegistry

logger = logging.getLogger(__name__)

#: Jobs that one hub works on at a time: their answers are in its memory at the end.
MOST_RUNNING: Final = 8
#: How often a hub looks whether jobs, or hubs, have changed.
_INTERVAL_S: Final = 1.0
_SWEEP_S: Final = 30.0
#: How long a hub that stops may take to give its jobs back.
_CLOSE_S: Final = 3.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
#: The code of a failure of the job store.
_STORE: Final = "job_store_failed"

#: Threads for the files of jobs. They wait for the job store, so that nothing else of a hub shall need them.
_THREADS: Final = 8

#: Makes a video: of the work, under an id of the request, for the client with this key's name. Raise OmniError.
Make = Callable[[JobWork, str, str], Awaitable[bytes]]
_Given = TypeVar("_Given")


@dataclass(slots=True)
class _Run:
    """A claim of this hub's that it works on."""

    job: JobRecord
    #: The lease under which it is this hub's.
    lease_id: int
    #: Whether it is another's by now, or is deleted: nothing of it may be told.
    is_lost: bool = False
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def request_id(self) -> str:
        """The id of its request to the pipeline."""
        return f"{self.job.job_id}-{self.job.claims}"


class JobService:
    """The jobs of one hub, on one event loop.

    ``keeps``: it keeps its jobs to itself, for ``files`` are in a folder of its own; they end with it.
    ``stages_begun`` says how many of how many stages of a request have begun, ``can_serve`` whether requests can be
    served at the moment.
    """

    def __init__(
        self,
        registry: JobRegistry,
        files: JobFiles,
        make: Make,
        bounds: life.JobBounds,
        *,
        keeps: bool,
        stages_begun: Callable[[str], tuple[int, int]],
        can_serve: Callable[[], bool] = lambda: True,
        clock: Clock | None = None,
    ) -> None:
        self._registry, self._files, self._make, self._bounds = registry, files, make, bounds
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="job-files")
        self._hub_id = registry.hub.hub_id
        self._keeps = keeps
        self._stages_begun, self._can_serve = stages_begun, can_serve
        self._clock = clock or SystemClock()
        #: By the job's id.
        self._runs: dict[str, _Run] = {}
        self._pace = life.ProgressPace()
        #: What etcd had when this hub looked last; None: look again.
        self._marks: Marks | None = None
        self._swept_at_s = float("-inf")
        #: The jobs that were listed last for a client, and what etcd had just before; one list at a time.
        self._listed: tuple[JobRecord, ...] = ()
        self._listed_marks: tuple[int, int] | None = None
        self._lists = asyncio.Lock()
        #: Jobs that are about to be written, by id; one look for room at a time.
        self._coming: dict[str, JobRecord] = {}
        self._looks_for_room = asyncio.Lock()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def keeps(self) -> bool:
        """Whether this hub keeps its jobs to itself."""
        return self._keeps

    def start(self) -> None:
        """Begin to claim and to sweep; return at once."""
        self._task = asyncio.create_task(self._serve(), name="jobs")

    async def close(self) -> None:
        """Stop to work and give the jobs back, so that another hub takes them at once. Idempotent."""
        task, self._task, self._is_closed = self._task, None, True
        if task is None:
            return
        runs = list(self._runs.values())
        for each in (task, *(run.task for run in runs if run.task is not None)):
            each.cancel()
        with suppress(TimeoutError, RegistryError):
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.gather(*(run.task for run in runs if run.task is not None), task, return_exceptions=True)
                await self._give_back(runs)

    # ---- what clients ask

    async def create(self, work: JobWork, client: life.Client, model: str, seconds: str, size: str) -> JobRecord:
        """Make a job. Raise OverloadedError if there is no room, JobsUnavailableError, or JobFileError."""
        if self._is_closed:
            raise HubUnavailableError(0, "this hub is stopping")
        now_s = self._clock.wall_s()
        job = JobRecord(
            job_id=f"video_{uuid.uuid4().hex}",
            state=JobState.QUEUED,
            created_at=now_s,
            expires_at=now_s + self._bounds.lifetime_s,
            client=client.name,
            client_mark=self._files.mark_of(self._files.secret, client) or "",
            hub=self._hub_id if self._keeps else "",
            secret=self._files.secret,
            model=model,
            seconds=seconds,
            size=size,
        )
        try:
            await self._take_place(job, client)
            await self._in_thread(self._files.write_file, job, REQUEST, encode_work(work))
            # A file whose record is not written after all goes with the next sweep but some.
            await self._registry.create_job(job)
            await self._check_order(job, client)
        except RegistryError as error:
            raise unavailable(error) from error
        finally:
            self._coming.pop(job.job_id, None)
        self._look_again()
        return job

    async def _take_place(self, job: JobRecord, client: life.Client) -> None:
        """Count a job as one that is coming. Raise OverloadedError if there is no room for it."""
        async with self._looks_for_room:
            # What is written while etcd is read is among these, or in what was read.
            coming = dict(self._coming)
            coming.update((each.job_id, each) for each in await self._registry.read_records())
            self._bounds.check_room(coming.values(), self._test_of(client))
            self._coming[job.job_id] = job

    async def _check_order(self, job: JobRecord, client: life.Client) -> None:
        """Take a job back if other hubs wrote so many at the same moment that this one is too much: the later ones go.

        Raise OverloadedError then.
        """
        if self._keeps:
            return
        before = list(takewhile(lambda each: each.job_id != job.job_id, await self._registry.read_records()))
        try:
            self._bounds.check_room(before, self._test_of(client))
        except OverloadedError:
            await self._registry.delete_job(job.job_id, lambda _found: True)
            await self._in_thread(self._files.remove_files, job)
            raise

    def _is_of(self, job: JobRecord, client: life.Client) -> bool:
        return job.client == client.name and job.client_mark == self._files.mark_of(job.secret, client)

    def _test_of(self, client: life.Client) -> Callable[[JobRecord], bool] | None:
        """Whether a job is this client's; None where all clients are one, for want of keys."""
        return partial(self._is_of, client=client) if client.name else None

    async def find(self, job_id: str, client: life.Client) -> JobRecord:
        """A job of this client's. Raise JobNotFoundError, JobsUnavailableError."""
        if not is_job_id(job_id):
            raise JobNotFoundError(job_id, "this is no id of one")
        try:
            job = await self._registry.read_job(job_id)
        except RegistryError as error:
            raise unavailable(error) from error
        if job is None or job.client != client.name:
            raise JobNotFoundError(job_id)
        if job.hub not in {"", self._hub_id}:
            raise JobNotFoundError(
                job_id,
                f"hub {job.hub} keeps it to itself, for it has no --job-store; ask that hub, or give all hubs one",
            )
        if not self._is_of(job, client):
            raise JobNotFoundError(job_id)
        return job

    async def page(
        self, client: life.Client, most: int, *, newest_first: bool, after: str | None = None
    ) -> tuple[list[JobRecord], bool]:
        """So many at most of this client's jobs that this hub can show, in the order in which they were made.

        Those behind the one with the id ``after``; and whether there are more. Raise InvalidRequestError if that one is
        none of this client's.
        """
        jobs = await self._in_order()
        mine = (
            job
            for job in (reversed(jobs) if newest_first else jobs)
            if self._is_of(job, client) and job.hub in {"", self._hub_id}
        )
        if after is not None and not any(job.job_id == after for job in mine):
            raise InvalidRequestError(f"'after': there is no video {after!r} of yours")
        found = list(islice(mine, most + 1))
        return found[:most], len(found) > most

    async def _in_order(self) -> tuple[JobRecord, ...]:
        """All jobs as they are now, of whomever, those first that were made first. They are read once a change."""
        async with self._lists:
            try:
                marks = await self._registry.job_marks()
                if marks != self._listed_marks:
                    read = await self._registry.read_records()
                    self._listed = tuple(sorted(read, key=lambda job: (job.created_at, job.job_id)))
                    self._listed_marks = marks
            except RegistryError as error:
                raise unavailable(error) from error
            return self._listed

    async def percent(self, job: JobRecord) -> int:
        """How far a job has come."""
        if job.state is JobState.COMPLETED:
            return 100
        if job.state is not JobState.IN_PROGRESS:
            return 0
        run = self._runs.get(job.job_id)
        if run is not None and run.job.claims == job.claims:
            return life.percent_of(*self._stages_begun(run.request_id))
        with suppress(RegistryError):
            return await self._registry.read_percent(job)
        return 0

    async def error_text(self, job: JobRecord) -> str:
        """Why a job has failed, for its client."""
        if not job.result:
            return "the hubs that worked on it were lost one after the other: it may be what ends them"
        try:
            part = error_of_claim(job.result)
            content = await self._in_thread(self._files.read_file, job, part)
        except (JobFileError, JobStoreUnavailableError) as error:
            what = "the job store failed, and so did" if job.error == _STORE else "it failed, and"
            return f"{what} the attempt to read why: {error}"
        return content.decode("utf-8", "replace")

    async def content(self, job: JobRecord) -> tuple[int, AsyncIterator[bytes]]:
        """The length of the answer of a completed job, and the answer in pieces.

        Raise JobFileError, JobStoreUnavailableError, here or later. The first piece has been read, so that what is
        wrong with the whole file is known before it is sent.
        """
        part = video_of(job.result)
        length, pieces = await self._in_thread(self._files.open_file, job, part)
        first = await self._in_thread(next, pieces, b"")
        return length, self._in_threads(first, pieces)

    async def delete(self, job_id: str, client: life.Client) -> None:
        """Delete a job with its files, and stop it. Raise as ``find``."""
        job = await self.find(job_id, client)
        try:
            await self._registry.delete_job(job_id, lambda found: self._is_of(found, client))
        except RegistryError as error:
            raise unavailable(error) from error
        self._lose(job_id, "it was deleted")
        await self._in_thread(self._files.remove_files, job)

    # ---- what the hub does by itself

    async def _serve(self) -> None:
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        is_first = True
        while True:
            self._wake.clear()
            delay_s = _INTERVAL_S
            try:
                if is_first and self._keeps:
                    await self._delete(lambda job, _live: job.hub == self._hub_id)
                is_first = False
                await self._turn()
                backoff.reset()
            except RegistryError as error:
                logger.log(backoff.log_level(error), "jobs.retrying reason=%s", error)
                delay_s = backoff.next_delay_s()
            except Exception:
                logger.exception("jobs.failed")
                delay_s = backoff.next_delay_s()
            await wait_for_event(self._wake, self._clock, delay_s)

    def _look_again(self) -> None:
        self._marks = None
        self._wake.set()

    async def _turn(self) -> None:
        hub = self._registry.hub
        if not hub.lease_id:
            return
        for run in list(self._runs.values()):
            if run.lease_id != hub.lease_id:
                await self._keep(run)
        marks = await self._registry.marks()
        if marks != self._marks:
            self._marks = marks
            try:
                await self._claim(await self._registry.read_all())
            except BaseException:
                self._marks = None
                raise
        await self._tell_progress()
        if self._clock.monotonic_s() - self._swept_at_s >= _SWEEP_S:
            self._swept_at_s = self._clock.monotonic_s()
            await self._sweep()

    async def _claim(self, jobs: Jobs) -> None:
        by_id = {job.job_id: job for job in jobs.records}
        for run in list(self._runs.values()):
            if life.is_lost(by_id.get(run.job.job_id), run.job.claims):
                self._lose(run.job.job_id, "it is another hub's, or was deleted")
        if self._is_closed or not self._can_serve():
            self._marks = None
            return
        room, now_s = MOST_RUNNING - len(self._runs), self._clock.wall_s()
        known = (job for job in jobs.records if self._files.knows(job.secret))
        for job in life.claimable(known, jobs.live, self._hub_id, self._runs.keys(), room, now_s):
            await self._claim_one(job)

    async def _claim_one(self, job: JobRecord) -> None:
        def change(found: JobRecord, hub: life.HubAtWork) -> JobRecord | None:
            is_as_seen = (found.owner, found.owner_lease, found.claims) == (job.owner, job.owner_lease, job.claims)
            return life.claimed(found, hub, self._clock.wall_s()) if is_as_seen and not found.has_ended else None

        mine = await self._registry.change_job(job.job_id, change)
        if mine is None:
            return
        if mine.has_ended:
            logger.error("jobs.given_up job=%s losses=%d: it may be what ends the hubs", job.job_id, mine.losses)
            return
        logger.info("jobs.claimed job=%s claim=%d after=%s", job.job_id, mine.claims, job.owner or "-")
        run = self._runs[job.job_id] = _Run(mine, mine.owner_lease)
        run.task = asyncio.create_task(self._work(run), name=job.job_id)

    async def _keep(self, run: _Run) -> None:
        """Stay the owner under the lease that this hub has now, unless another was faster."""

        def change(job: JobRecord, hub: life.HubAtWork) -> JobRecord | None:
            return life.kept(job, hub) if life.is_of_claim(job, self._hub_id, run.job.claims) else None

        changed = await self._registry.change_job(run.job.job_id, change)
        # Else it is over, or another's by now, which the next look at the jobs shows.
        if changed is not None:
            run.lease_id = changed.owner_lease

    def _lose(self, job_id: str, reason: str) -> None:
        run = self._runs.get(job_id)
        if run is not None and run.task is not None and not run.is_lost:
            logger.info("jobs.stopped job=%s claim=%d reason=%s", job_id, run.job.claims, reason)
            run.is_lost = True
            run.task.cancel()

    async def _work(self, run: _Run) -> None:
        job = run.job
        try:
            await self._make_and_tell(run)
        except Exception:
            logger.exception("jobs.defect job=%s", job.job_id)
            with suppress(RegistryError, JobFileError):
                await self._fail(run, "internal_error", "an internal error of the hub: its log says more")
        finally:
            if self._runs.get(job.job_id) is run:
                del self._runs[job.job_id]
            if run.is_lost:
                # What it may have written is nobody's.
                await self._in_thread(self._drop_files, run)
            self._look_again()

    async def _make_and_tell(self, run: _Run) -> None:
        job, tries = run.job, 0
        try:
            work = decode_work(await self._stored(run, self._files.read_file, job, REQUEST))
        except (JobFileError, JobStoreUnavailableError, InvalidRequestError) as error:
            await self._fail(run, _STORE, str(error))
            return
        while True:
            tries += 1
            try:
                video = await self._make(work, run.request_id, job.client)
                break
            except OmniError as error:
                if is_of_this_hub(error) and not self._keeps:
                    await self._release(run)
                    return
                pause_s = pause_before_retry_s(error, tries)
                if pause_s is None:
                    await self._fail(run, code_of(error), str(error))
                    return
                logger.info("jobs.tried_again job=%s tries=%d pause_s=%.1f", job.job_id, tries, pause_s)
            await self._clock.sleep(pause_s)
        try:
            await self._stored(run, self._files.write_file, job, video_of(job.claims), video)
        except (JobFileError, JobStoreUnavailableError) as error:
            await self._fail(run, _STORE, str(error))
            return
        now_s = self._clock.wall_s()
        if await self._tell(run, partial(life.completed, now_s=now_s)):
            logger.info("jobs.completed job=%s claim=%d bytes=%d", job.job_id, job.claims, len(video))

    async def _stored(self, run: _Run, call: Callable[..., _Given], *arguments: Any) -> _Given:
        """A call of the job store's for a job, again and again while the store does not answer. Raise as the call."""
        tries = 0
        while True:
            tries += 1
            try:
                return await self._in_thread(call, *arguments)
            except JobStoreUnavailableError as error:
                pause_s = pause_before_retry_s(error, tries)
                if pause_s is None:
                    raise
                text = "jobs.store_asked_again job=%s tries=%d pause_s=%.1f reason=%s"
                logger.warning(text, run.job.job_id, tries, pause_s, error)
            await self._clock.sleep(pause_s)

    async def _fail(self, run: _Run, code: str, text: str) -> None:
        job = run.job
        with suppress(JobFileError, JobStoreUnavailableError):
            write = partial(self._files.write_file, job, error_of_claim(job.claims), text.encode()[:65_536])
            # A store that has failed the job was asked often enough.
            await (self._in_thread(write) if code == _STORE else self._stored(run, write))
        now_s = self._clock.wall_s()
        if await self._tell(run, partial(life.failed, now_s=now_s, code=code)):
            # No text: it may hold parts of what the client has sent.
            level = logging.INFO if code == CLIENTS_FAULT else logging.WARNING
            logger.log(level, "jobs.job_failed job=%s claim=%d code=%s", job.job_id, job.claims, code)

    async def _release(self, run: _Run) -> None:
        if await self._tell(run, life.released):
            logger.info("jobs.released job=%s claim=%d", run.job.job_id, run.job.claims)

    async def _tell(self, run: _Run, change: Callable[[JobRecord], JobRecord]) -> bool:
        """Write what has become of a job, however long that takes. False, and nothing is written: it is another's."""
        job, backoff = run.job, Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)

        def changed(found: JobRecord, _hub: life.HubAtWork) -> JobRecord | None:
            return change(found) if life.is_of_claim(found, self._hub_id, job.claims) else None

        while True:
            try:
                written = await self._registry.change_job(job.job_id, changed)
                # An earlier attempt may have written it, whose answer was lost.
                found = written or await self._registry.read_job(job.job_id)
                break
            except RegistryError as error:
                logger.log(backoff.log_level(error), "jobs.telling job=%s reason=%s", job.job_id, error)
                await self._clock.sleep(backoff.next_delay_s())
        is_told = written is not None or (found is not None and found.has_ended and found.result == job.claims)
        if not is_told:
            logger.warning("jobs.fenced job=%s claim=%d: it is another's by now", job.job_id, job.claims)
            await self._in_thread(self._drop_files, run)
        with suppress(RegistryError):
            await self._registry.drop_progress(job.job_id)
        return is_told

    def _drop_files(self, run: _Run) -> None:
        for part in (video_of(run.job.claims), error_of_claim(run.job.claims)):
            self._files.remove_file(run.job, part)

    async def _tell_progress(self) -> None:
        percents = {run.job.job_id: life.percent_of(*self._stages_begun(run.request_id)) for run in self._runs.values()}
        for job_id in self._pace.due(percents, self._clock.monotonic_s()):
            if (run := self._runs.get(job_id)) is not None:
                await self._registry.write_progress(job_id, run.job.claims, percents[job_id])

    async def _sweep(self) -> None:
        """Delete what is old: of all if this hub is the one that does, else of what it keeps to itself."""
        is_sweeper, now_s = await self._registry.claim_sweep(), self._clock.wall_s()

        def is_due(job: JobRecord, live: dict[str, int]) -> bool:
            is_ours = job.hub == self._hub_id or (is_sweeper and (not job.hub or job.hub not in live))
            return is_ours and life.is_due(job, live.keys(), now_s)

        known = await self._delete(is_due)
        if self._keeps or is_sweeper:
            removed = await self._in_thread(self._files.remove_orphans, known)
            if removed:
                logger.info("jobs.orphans_removed files=%d", removed)

    async def _delete(self, is_due: Callable[[JobRecord, dict[str, int]], bool]) -> list[JobRecord]:
        """Delete the jobs that are due with their files; return all others."""
        jobs, left = await self._registry.read_all(), []
        for job in jobs.records:
            if is_due(job, jobs.live) and await self._registry.delete_job(
                job.job_id, lambda found: is_due(found, jobs.live)
            ):
                self._lose(job.job_id, "it has expired")
                await self._in_thread(self._files.remove_files, job)
                logger.info("jobs.deleted job=%s", job.job_id)
            else:
                left.append(job)
        return left

    async def _give_back(self, runs: list[_Run]) -> None:
        if self._keeps:
            await self._delete(lambda job, _live: job.hub == self._hub_id)
            return
        for run in runs:
            if not run.is_lost:
                await self._release(run)

    # ---- the files

    async def _in_thread(self, call: Callable[..., _Given], *arguments: Any) -> _Given:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(call, *arguments))

    async def _in_threads(self, first: bytes, pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
        """The pieces of a file, each read and decrypted in a thread."""
        piece = first
        while piece:
            yield piece
            piece = await self._in_thread(next, pieces, b"")
