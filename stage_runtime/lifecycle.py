"""The life of one replica: what it is doing, whether it takes work, whether it has stopped moving."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from omni_discovery.records.schema import ReplicaStatus
from omni_discovery.wire import FailureKind


class Stage(StrEnum):
    """Where in its life a replica is."""

    STARTING = "starting"
    READY = "ready"
    #: Ready, but put to sleep by a control call, or about to be: nothing is taken. The lifecycle itself calls it READY.
    ASLEEP = "asleep"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class EngineLoaded:
    """The engine can take work."""


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """The supervisor or the operator wants the replica to finish and go."""


@dataclass(frozen=True, slots=True)
class WorkFinished:
    """Nothing is in flight any more, or the drain's bound has passed."""


@dataclass(frozen=True, slots=True)
class EngineDied:
    """The engine raised or could not be loaded."""

    reason: str


LifecycleEvent = EngineLoaded | DrainAsked | WorkFinished | EngineDied


class Lifecycle:
    """STARTING -> READY -> DRAINING -> STOPPED, and FAILED from any of the first three."""

    def __init__(self) -> None:
        #: Written by the replica's main thread only; other threads read it as one value.
        self.stage = Stage.STARTING
        #: Why the replica failed; empty otherwise.
        self.reason = ""

    def handle(self, event: LifecycleEvent) -> bool:
        """Apply one event; say whether anything changed. An event that does not fit changes nothing."""
        if self.stage in (Stage.STOPPED, Stage.FAILED):
            return False
        before = self.stage
        match event:
            case EngineLoaded():
                self.stage = Stage.READY if before is Stage.STARTING else before
            case DrainAsked():
                self.stage = Stage.DRAINING
            case WorkFinished():
                self.stage = Stage.STOPPED if before is Stage.DRAINING else before
            case EngineDied(reason):
                self.stage, self.reason = Stage.FAILED, reason
        return self.stage is not before


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not taken."""

    kind: FailureKind
    reason: str


def admit(stage: Stage, in_flight: int, limit: int) -> Refusal | None:
    """Whether one more request may come in: None means yes. ``limit`` bounds what runs and what waits together."""
    match stage:
        case Stage.READY if in_flight >= limit:
            return Refusal(FailureKind.OVERLOADED, f"{in_flight} requests are in flight, the bound is {limit}")
        case Stage.READY:
            return None
        case Stage.STARTING:
            return Refusal(FailureKind.OVERLOADED, "the replica is still loading its model")
        case Stage.ASLEEP:
            return Refusal(FailureKind.DRAINING, "the replica is asleep")
        case Stage.DRAINING | Stage.STOPPED:
            return Refusal(FailureKind.DRAINING, "the replica is draining")
        case Stage.FAILED:
            return Refusal(FailureKind.ENGINE, "the replica's engine is dead")


def stalled(busy: bool, now_s: float, progress_at_s: float, stall_after_s: float) -> bool:
    """Whether the replica has work and has not moved it for too long: alive is not able."""
    return busy and now_s - progress_at_s > stall_after_s


_STATUS: Final = {
    Stage.STARTING: ReplicaStatus.STARTING,
    Stage.READY: ReplicaStatus.UP,
    Stage.ASLEEP: ReplicaStatus.STARTING,
    Stage.DRAINING: ReplicaStatus.DRAINING,
    Stage.STOPPED: ReplicaStatus.DOWN,
    Stage.FAILED: ReplicaStatus.ERROR,
}


def published_status(stage: Stage, is_stalled: bool) -> ReplicaStatus:
    """What the record says; a stalled replica is not to be picked."""
    return ReplicaStatus.ERROR if is_stalled else _STATUS[stage]
