"""The life of a job: its states, which hub may claim it, when its owner has lost it, and how many there may be. Pure.

    queued ──claim──▶ in_progress ──▶ completed, failed
       ◀──release, by a hub that stops──┘

A hub owns a job for as long as the hub's key in etcd has the lease that the record names. A job whose owner is lost is
claimed again as if it were queued. Every claim has a number; what one claim has written, no other takes for its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from omni_discovery.errors import ConfigError, OverloadedError
from omni_discovery.records.jobs import JobRecord, JobState

#: Hubs that may be lost with a job in hand before it is given up: it may be what ends them.
MOST_LOSSES: Final = 3
#: The code of the error of a job that was given up so.
LOST: Final = "hubs_lost"
_RETRY_AFTER_S: Final = 30.0
LONGEST_LIFETIME_S: Final = 30 * 86_400.0
#: By how much the clocks of hubs may differ.
_CLOCK_SLACK_S: Final = 86_400.0
#: How far a job may have come before its answer is there, in per cent.
_MOST_UNFINISHED: Final = 99


@dataclass(frozen=True, slots=True)
class Client:
    """Who asks: the name of an API key and its SHA-256; both empty where none is asked for.

    A job belongs to the key with which it was made: two keys may have one name, in two files or one after the other.
    """

    name: str = ""
    digest: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class JobBounds:
    """How many jobs a namespace keeps, ended ones too, and for how long. Raise ConfigError for values out of range."""

    most: int = 1000
    most_per_client: int = 100
    lifetime_s: float = 86_400.0

    def __post_init__(self) -> None:
        """Check the values."""
        if not 1 <= self.most <= 10_000:
            raise ConfigError(f"--max-jobs is {self.most}; it must be from 1 to 10000")
        if not 1 <= self.most_per_client <= self.most:
            raise ConfigError(f"--max-jobs-per-client is {self.most_per_client}; it must be from 1 to {self.most}")
        if not 60 <= self.lifetime_s <= LONGEST_LIFETIME_S:
            raise ConfigError(f"--job-lifetime is {self.lifetime_s:g}; it must be from 60 to 2592000 seconds")

    def check_room(self, jobs: Collection[JobRecord], is_mine: Callable[[JobRecord], bool] | None) -> None:
        """Raise OverloadedError if there is no room for one more of a client; None: it can't be told from others."""
        if len(jobs) >= self.most:
            text = f"{self.most} videos are kept here, which is the most: wait until older ones have expired"
            raise OverloadedError(text, _RETRY_AFTER_S)
        if is_mine is not None and sum(map(is_mine, jobs)) >= self.most_per_client:
            text = f"{self.most_per_client} videos are kept of this key, which is the most: delete some"
            raise OverloadedError(text, _RETRY_AFTER_S)


@dataclass(frozen=True, slots=True)
class HubAtWork:
    """A hub as the owner of jobs: its id, and the lease of its key at this moment, 0 without one."""

    hub_id: str
    lease_id: int


def is_owned(job: JobRecord, live: Mapping[str, int]) -> bool:
    """Whether a job has an owner that lives; ``live`` has the lease of each hub's key."""
    return bool(job.owner) and bool(job.owner_lease) and live.get(job.owner) == job.owner_lease


def claimable(
    jobs: Iterable[JobRecord],
    live: Mapping[str, int],
    hub_id: str,
    running: Collection[str],
    room: int,
    now_s: float,
) -> list[JobRecord]:
    """The jobs that this hub may claim now, those first that were made first; at most ``room``.

    ``running`` are those that it works on: of them it stays the owner under its next lease, unless another was faster.
    """
    others = {each: lease for each, lease in live.items() if each != hub_id}
    free = (
        job
        for job in jobs
        if not job.has_ended
        and job.expires_at > now_s
        and job.hub in {"", hub_id}
        and job.job_id not in running
        and not is_owned(job, others)
    )
    return sorted(free, key=lambda job: (job.created_at, job.job_id))[: max(0, room)]


def claimed(job: JobRecord, hub: HubAtWork, now_s: float) -> JobRecord:
    """The job in this hub's hands; failed if it has lost too many."""
    losses = job.losses + bool(job.owner)
    if losses > MOST_LOSSES:
        return replace(job, state=JobState.FAILED, owner="", owner_lease=0, losses=losses, ended_at=now_s, error=LOST)
    return replace(
        job,
        state=JobState.IN_PROGRESS,
        owner=hub.hub_id,
        owner_lease=hub.lease_id,
        claims=job.claims + 1,
        losses=losses,
        started_at=now_s,
    )


def is_of_claim(job: JobRecord | None, hub_id: str, claim: int) -> bool:
    """Whether a job still is in the hands of this claim."""
    return job is not None and (job.state, job.owner, job.claims) == (JobState.IN_PROGRESS, hub_id, claim)


def is_lost(job: JobRecord | None, claim: int) -> bool:
    """Whether a claim has lost its job: the job is gone, another has claimed it, or it has ended by another's word."""
    return job is None or job.claims != claim or (job.has_ended and job.result != claim)


def kept(job: JobRecord, hub: HubAtWork) -> JobRecord:
    """The same owner, under the lease that it has now."""
    return replace(job, owner_lease=hub.lease_id)


def released(job: JobRecord) -> JobRecord:
    """The job of a hub that stops: another one takes it at once, and it counts as no loss."""
    return replace(job, state=JobState.QUEUED, owner="", owner_lease=0, started_at=0.0)


def completed(job: JobRecord, now_s: float) -> JobRecord:
    """The job with the answer that this claim has written."""
    return replace(job, state=JobState.COMPLETED, owner="", owner_lease=0, ended_at=now_s, result=job.claims, error="")


def failed(job: JobRecord, now_s: float, code: str) -> JobRecord:
    """The job with the error whose text this claim has written."""
    return replace(job, state=JobState.FAILED, owner="", owner_lease=0, ended_at=now_s, result=job.claims, error=code)


def is_due(job: JobRecord, live: Collection[str], now_s: float) -> bool:
    """Whether a job is to be deleted: it is too old, or the hub that has kept it to itself is gone.

    No hub makes one that lives longer than any may; such a record was written by hand, or by a wrong clock.
    """
    is_too_long = job.expires_at > now_s + LONGEST_LIFETIME_S + _CLOCK_SLACK_S
    return now_s >= job.expires_at or is_too_long or bool(job.hub and job.hub not in live)


def percent_of(begun: int, stages: int) -> int:
    """How far a request is of which so many stages have begun: each counts as much as any other."""
    return min(_MOST_UNFINISHED, 100 * max(0, begun - 1) // max(1, stages))


class ProgressPace:
    """Which changes of progress are to be written: at most one a second of each job, and so many of all together."""

    INTERVAL_S: Final = 1.0
    MOST_PER_TURN: Final = 8

    def __init__(self) -> None:
        #: What was written last, and when, by job.
        self._written: dict[str, tuple[int, float]] = {}

    def due(self, percents: Mapping[str, int], now_s: float) -> list[str]:
        """The jobs whose progress is to be written now, those first that have waited longest. It counts as written."""
        self._written = {job: each for job, each in self._written.items() if job in percents}
        waiting = []
        for job, percent in percents.items():
            before, at_s = self._written.get(job, (0, -self.INTERVAL_S))
            if percent != before and now_s - at_s >= self.INTERVAL_S:
                waiting.append((at_s, job))
        chosen = [job for _, job in sorted(waiting)[: self.MOST_PER_TURN]]
        for job in chosen:
            self._written[job] = percents[job], now_s
        return chosen
