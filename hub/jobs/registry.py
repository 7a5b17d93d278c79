"""JobRegistry: the records of a namespace's jobs in etcd, and who of the hubs lives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hub.jobs.errors import JobsUnavailableError
from hub.jobs.job import HubAtWork
from omni_discovery.errors import LeaseNotFoundError, RecordError, RegistryDeniedError, RegistryError
from omni_discovery.kv import Held, KeyValue
from omni_discovery.log_once import LogOnce
from omni_discovery.records import keys
from omni_discovery.records.jobs import (
    JobProgress,
    JobRecord,
    decode_job,
    decode_progress,
    encode_job,
    job_key,
    jobs_prefix,
    progress_key,
    sweep_key,
)

if TYPE_CHECKING:
    from omni_discovery.kv import KVCalls

logger = logging.getLogger(__name__)

#: Attempts of a change that others interfere with.
_MOST_ATTEMPTS: Final = 8
#: Records that are read: twice as many as there may be. Every hub may write any number.
MOST_READ: Final = 20_000
#: Items that are looked at in one turn of the loop.
_OF_A_TURN: Final = 256


@dataclass(frozen=True, slots=True)
class Marks:
    """What has to be different for the jobs, or the hubs, to be others than before."""

    jobs: tuple[int, int]
    hubs: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Jobs:
    """The jobs of the namespace, and the lease of each hub's key, by the hub's id."""

    records: tuple[JobRecord, ...]
    live: dict[str, int]


class JobRegistry:
    """Reads and writes as one hub. ``lease`` says which lease the hub's own key has. All calls raise RegistryError."""

    def __init__(self, kv: KVCalls, namespace: str, hub_id: str, lease: Callable[[], int]) -> None:
        self._kv = kv
        self._namespace = namespace
        self._hub_id = hub_id
        self._lease = lease
        self._log_once = LogOnce()

    @property
    def hub(self) -> HubAtWork:
        """The hub itself, and its lease now."""
        return HubAtWork(self._hub_id, self._lease())

    async def marks(self) -> Marks:
        """Cheap to read, and others whenever anything has changed."""
        hubs = await self._kv.summary(keys.hubs_prefix(self._namespace))
        return Marks(await self.job_marks(), (hubs.count, hubs.max_mod_revision))

    async def job_marks(self) -> tuple[int, int]:
        """The marks of the jobs alone."""
        jobs = await self._kv.summary(jobs_prefix(self._namespace))
        return jobs.count, jobs.max_mod_revision

    async def read_all(self) -> Jobs:
        """All jobs, and the hubs that live. The jobs first: whoever has claimed one of them by then is among these."""
        jobs = await self.read_records()
        live = {}
        listed = (await self._kv.list(keys.hubs_prefix(self._namespace), keys_only=True)).items
        async for item in _in_turns(listed):
            match keys.parse_key(self._namespace, item.key):
                case keys.HubKey(hub_id) if item.lease_id:
                    live[hub_id] = item.lease_id
        return Jobs(jobs, live)

    async def read_records(self) -> tuple[JobRecord, ...]:
        """All jobs whose records can be read, that which was written first before all others; of too many the first."""
        items = (await self._kv.list(jobs_prefix(self._namespace))).items
        bad, records = [], []
        async for item in _in_turns(sorted(items, key=lambda item: item.create_revision)[:MOST_READ]):
            try:
                records.append(decode_job(item))
            except RecordError as error:
                bad.append(error)
        if bad:
            self._log_bad(bad[0], len(bad))
        return tuple(records)

    async def read_job(self, job_id: str) -> JobRecord | None:
        """One job; None for one that is not there, or can't be read."""
        item = await self._kv.get(job_key(self._namespace, job_id))
        return None if item is None else self._read(item)

    async def read_percent(self, job: JobRecord) -> int:
        """How far a running job has come, in per cent."""
        item = await self._kv.get(progress_key(self._namespace, job.job_id))
        return 0 if item is None else decode_progress(item.value, job.claims)

    async def create_job(self, job: JobRecord) -> bool:
        """Write a new job; False if there is one of this id. Raise RecordError for what could not be read again."""
        key, value = job_key(self._namespace, job.job_id), encode_job(job)
        # A record that no hub can read would neither be counted nor ever deleted.
        decode_job(KeyValue(key, value, 0, 0))
        return (await self._kv.create(key, value)).won

    async def change_job(
        self, job_id: str, change: Callable[[JobRecord, HubAtWork], JobRecord | None]
    ) -> JobRecord | None:
        """Change a job; return it as changed, None if it is gone or ``change`` returns None.

        It is written only while this hub's key has its lease, and only if nobody has changed the job meanwhile; then
        ``change`` is asked again. A hub that has no lease changes nothing.
        """
        key = job_key(self._namespace, job_id)
        for _ in range(_MOST_ATTEMPTS):
            item = await self._kv.get(key)
            record = None if item is None else self._read(item)
            hub = self.hub
            changed = None if record is None else change(record, hub)
            if item is None or changed is None:
                return None
            if not hub.lease_id:
                raise LeaseNotFoundError("this hub has no lease at the moment")
            held = Held(keys.hub_key(self._namespace, self._hub_id), hub.lease_id)
            if (await self._kv.compare_and_put(key, encode_job(changed), item.mod_revision, held=held)).won:
                return changed
        raise LeaseNotFoundError("this hub's key does not have its lease at the moment")

    async def delete_job(self, job_id: str, may_delete: Callable[[JobRecord], bool]) -> bool:
        """Delete a job if it may be; whether it was there and is gone."""
        key = job_key(self._namespace, job_id)
        while True:
            item = await self._kv.get(key)
            record = None if item is None else self._read(item)
            if item is None or record is None or not may_delete(record):
                return False
            if await self._kv.delete(key, item.mod_revision):
                await self.drop_progress(job_id)
                return True

    async def write_progress(self, job_id: str, claim: int, percent: int) -> None:
        """Say how far a job has come. The key ends with this hub's lease."""
        if lease_id := self._lease():
            value = encode_job(JobProgress(claim=claim, percent=percent))
            await self._kv.put(progress_key(self._namespace, job_id), value, lease_id)

    async def drop_progress(self, job_id: str) -> None:
        """Nothing is to be said of how far a job has come."""
        await self._kv.delete(progress_key(self._namespace, job_id))

    async def claim_sweep(self) -> bool:
        """Whether this hub is the one that deletes expired jobs."""
        if not (lease_id := self._lease()):
            return False
        claim = await self._kv.create(sweep_key(self._namespace), self._hub_id.encode(), lease_id)
        return claim.current is not None and claim.current.lease_id == lease_id

    def _read(self, item: KeyValue) -> JobRecord | None:
        try:
            return decode_job(item)
        except RecordError as error:
            self._log_bad(error, 1)
            return None

    def _log_bad(self, first: RecordError, count: int) -> None:
        if self._log_once.should((first.key[:200], count)):
            text = "jobs.bad_record key=%s count=%d reason=%s: ignored; delete those that no newer release wrote"
            logger.warning(text, first.key[:200], count, first.reason[:200])


async def _in_turns(items: Sequence[KeyValue]) -> AsyncIterator[KeyValue]:
    """These, with a turn of the loop for others now and then."""
    for number, item in enumerate(items, 1):
        yield item
        if number % _OF_A_TURN == 0:
            await asyncio.sleep(0)


def unavailable(error: RegistryError) -> JobsUnavailableError:
    """What a client is told of an error of the registry."""
    if isinstance(error, RegistryDeniedError):
        return JobsUnavailableError(
            "the etcd user of this hub may not read or write videos: the operator gives it the role 'hub' once more, by"
            " omni etcd grant-role"
        )
    return JobsUnavailableError(f"etcd, which knows the videos, does not answer this hub now ({type(error).__name__})")
