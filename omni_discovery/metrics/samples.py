"""What a replica and its supervisor report of themselves once a second, and the latest reports of one host.

A replica writes its report to its supervisor's pipe; a supervisor that a hub has started passes it on to that hub.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec

#: How often a replica and a supervisor report.
SAMPLE_INTERVAL_S: Final = 1.0
#: An older report of a replica is not shown any more: it hangs, or its host is overloaded.
STALE_AFTER_S: Final = 15.0


#: What prints in a replica may have written a line of these: metrics take no numbers of hundreds of digits.
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class GpuMemory(msgspec.Struct, frozen=True):
    """The memory of one device, as far as this replica's process sees it: of all processes that use the device."""

    index: _Count
    used_bytes: _Count
    total_bytes: _Count


class ReplicaSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="replica"):
    """The state of one replica at one moment. Counts are those since its process began."""

    stage_id: _Count
    replica_id: _Count
    #: Whether it takes requests: its record says ``up``.
    is_up: bool = False
    #: Requests that it has accepted and that have not ended.
    in_flight: _Count = 0
    slots: _Count = 0
    #: Slots that run a request, and slots that are lent to hubs as credits which they have not spent.
    credits_used: _Count = 0
    credits_lent: _Count = 0
    #: The hubs that hold these credits, by id.
    credits_by_hub: dict[str, _Count] = {}
    #: Hubs that the registry lists; None while that is not known.
    hubs: _Count | None = None
    #: How long the lease lasts if it is not renewed; 0 without a lease.
    lease_left_s: float = 0.0
    engine_steps: _Count = 0
    prompt_tokens: _Count = 0
    completion_tokens: _Count = 0
    #: Requests that ended, by ``ok``, ``cancelled`` or the wire's failure kind.
    outcomes: dict[str, _Count] = {}
    #: What the replica's sockets refused, dropped or gave up, by kind.
    events: dict[str, _Count] = {}
    #: What the engine measures itself, see ``MeasuredEngine``.
    engine: dict[str, float] = {}
    gpus: tuple[GpuMemory, ...] = ()
    #: Facts that do not change while the process runs, by name.
    about: dict[str, str] = {}


class SupervisorSample(msgspec.Struct, frozen=True, kw_only=True, tag="supervisor"):
    """The state of the supervisor of one stage's local replicas. ``restarts`` counts since the supervisor began."""

    namespace: str
    stage_id: _Count
    #: How many replicas it keeps up; those that an operator has drained do not count.
    wanted: _Count
    restarts: _Count
    #: The replicas whose processes run, as far as they have a replica id.
    replica_ids: tuple[_Count, ...]


Sample = ReplicaSample | SupervisorSample

_DECODER: Final[msgspec.json.Decoder[Sample]] = msgspec.json.Decoder(Sample)


def encode_sample(sample: Sample) -> bytes:
    """A sample as one line of JSON, without the end of the line."""
    return msgspec.json.encode(sample)


def decode_sample(content: bytes) -> Sample | None:
    """The sample in these bytes; None if they hold none that this version can read."""
    try:
        return _DECODER.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
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
