"""The life of one replica: what it is doing, whether it takes work, whether it has stopped moving.

A drain: what it waits for, and until when.
"""

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


_NEVER: Final = float("inf")
#: How long a registry may say nothing of the hubs: the hubs of one that is away are told by refusals.
_UNHEARD_TIMEOUT_S: Final = 1.5


class Verdict(StrEnum):
    """What a draining replica does now."""

    WAIT = "wait"
    #: Nothing is in flight, and nothing more will come.
    DONE = "done"
    #: The drain's bound has passed while something is in flight.
    GIVE_UP = "give-up"


class Drain:
    """Pure; moments are monotonic seconds.

    A drain is done when nothing is in flight and every hub has said that it picks this replica no more. A hub that
    says nothing is waited for at most ``ack_timeout_s`` from the begin, and not even that where the registry does not
    say who they are; work in flight for as long as those who asked
    for the drain have patience.
    """

    def __init__(self, ack_timeout_s: float) -> None:
        self._ack_timeout_s = ack_timeout_s
        #: When the first was asked for; None before.
        self._began_s: float | None = None
        #: When what still runs is failed. Never, while it was the operator who asked by the control key.
        self._until_s = _NEVER
        #: Whether every live hub has applied that this replica is draining. May be set from any thread.
        self.is_acknowledged = False

    @property
    def is_bounded(self) -> bool:
        """Whether somebody has asked who will not wait for ever."""
        return self._until_s < _NEVER

    def ask(self, now_s: float, patience_s: float) -> None:
        """Drain, and fail in ``patience_s`` what runs by then. The least patient of all who asked counts."""
        if self._began_s is None:
            self._began_s = now_s
        self._until_s = min(self._until_s, now_s + patience_s)

    def verdict(self, now_s: float, in_flight: int, *, knows_hubs: bool = True) -> Verdict:
        """What is to be done, once a drain was asked for. ``knows_hubs``: the registry has said whom to wait for."""
        if in_flight:
            return Verdict.GIVE_UP if now_s >= self._until_s else Verdict.WAIT
        began_s = now_s if self._began_s is None else self._began_s
        timeout_s = self._ack_timeout_s if knows_hubs else min(_UNHEARD_TIMEOUT_S, self._ack_timeout_s)
        is_over = now_s >= min(self._until_s, began_s + timeout_s)
        return Verdict.DONE if self.is_acknowledged or is_over else Verdict.WAIT
