"""What a replica and its supervisor report of themselves once a second, and the latest reports of one host.

A replica writes its report to its supervisor's pipe; a supervisor that a hub has started passes it on to that hub.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

#: How often a replica and a supervisor report.
SAMPLE_INTERVAL_S: Final = 1.0
#: An older report of a replica is not shown any more: it hangs, or its host is overloaded.
STALE_AFTER_S: Final = 15.0


class GpuMemory(msgspec.Struct, frozen=True):
    """The memory of one device, as far as this replica's process sees it: of all processes that use the device."""

    index: int
    used_bytes: int
    total_bytes: int


class ReplicaSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="replica"):
    """The state of one replica at one moment. Counts are those since its process began."""

    stage_id: int
    replica_id: int
    #: Whether it takes requests: its record says ``up``.
    is_up: bool = False
    #: Requests that it has accepted and that have not ended.
    in_flight: int = 0
    slots: int = 0
    #: Slots that run a request, and slots that are lent to hubs as credits which they have not spent.
    credits_used: int = 0
    credits_lent: int = 0
    #: The hubs that hold these credits, by id.
    credits_by_hub: dict[str, int] = {}
    #: Hubs that the registry lists; None while that is not known.
    hubs: int | None = None
    #: How long the lease lasts if it is not renewed; 0 without a lease.
    lease_left_s: float = 0.0
    engine_steps: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    #: Requests that ended, by ``ok``, ``cancelled`` or the wire's failure kind.
    outcomes: dict[str, int] = {}
    #: What the replica's sockets refused, dropped or gave up, by kind.
    events: dict[str, int] = {}
    #: What the engine measures itself, see ``MeasuredEngine``.
    engine: dict[str, float] = {}
    gpus: tuple[GpuMemory, ...] = ()
    #: Facts that do not change while the process runs, by name.
    about: dict[str, str] = {}


class SupervisorSample(msgspec.Struct, frozen=True, kw_only=True, tag="supervisor"):
    """The state of the supervisor of one stage's local replicas. ``restarts`` counts since the supervisor began."""

    namespace: str
    stage_id: int
    #: How many replicas it keeps up; those that an operator has drained do not count.
    wanted: int
    restarts: int
    #: The replicas whose processes run, as far as they have a replica id.
    replica_ids: tuple[int, ...]


Sample = ReplicaSample | SupervisorSample

_DECODER: Final[msgspec.json.Decoder[Sample]] = msgspec.json.Decoder(Sample)


def encode_sample(sample: Sample) -> bytes:
    """A sample as one line of JSON, without the end of the line."""
    return msgspec.json.encode(sample)


def decode_sample(content: bytes) -> Sample | None:
    """The sample in these bytes; None if they hold none that this version can read."""
    try:
        return _DECODER.decode(content)
    except msgspec.DecodeError:
        return None


@dataclass(frozen=True, slots=True)
class HostSamples:
    """The latest samples of one host: by stage, and by stage and replica id."""

    supervisors: Mapping[int, SupervisorSample] = field(default_factory=dict)
    replicas: Mapping[tuple[int, int], ReplicaSample] = field(default_factory=dict)


class LatestSamples:
    """Keeps the latest sample of each replica and supervisor. Written by one thread, read by any.

    Moments are monotonic seconds.
    """

    def __init__(self) -> None:
        #: Both are replaced as a whole, so that readers need no lock.
        self._supervisors: Mapping[int, SupervisorSample] = {}
        #: With the moment at which each came.
        self._replicas: Mapping[tuple[int, int], tuple[float, ReplicaSample]] = {}

    def take_sample(self, sample: Sample, now_s: float) -> None:
        """Keep a sample. One of a supervisor also forgets the replicas of its stage that it does not name."""
        if isinstance(sample, ReplicaSample):
            self._replicas = {**self._replicas, (sample.stage_id, sample.replica_id): (now_s, sample)}
            return
        self._supervisors = {**self._supervisors, sample.stage_id: sample}
        self._replicas = {
            (stage_id, replica_id): kept
            for (stage_id, replica_id), kept in self._replicas.items()
            if stage_id != sample.stage_id or replica_id in sample.replica_ids
        }

    def latest(self, now_s: float) -> HostSamples:
        """The samples of all supervisors, and those of replicas that are not older than STALE_AFTER_S."""
        since_s = now_s - STALE_AFTER_S
        replicas = {key: sample for key, (at_s, sample) in self._replicas.items() if at_s >= since_s}
        return HostSamples(self._supervisors, replicas)
