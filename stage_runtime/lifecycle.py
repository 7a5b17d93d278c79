"""The lifecycle of one replica: its state, admission of requests, the stall check, and how long a drain waits. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from omni_discovery.records.schema import ReplicaStatus
from omni_discovery.wire import FailureKind


class LifeState(StrEnum):
    """The state of a replica's life."""

    STARTING = "starting"
    READY = "ready"
    #: Ready, but put to sleep by a control call, or about to be: no request is admitted. Lifecycle.state stays READY.
    ASLEEP = "asleep"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class EngineLoaded:
    """The engine has loaded its model."""


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """The supervisor or the operator has requested a drain."""


@dataclass(frozen=True, slots=True)
class WorkFinished:
    """No request is in flight any more, or the drain's deadline has passed."""


@dataclass(frozen=True, slots=True)
class EngineDied:
    """The engine raised or could not be loaded."""

    reason: str


LifecycleEvent = EngineLoaded | DrainAsked | WorkFinished | EngineDied


class Lifecycle:
    """STARTING -> READY -> DRAINING -> STOPPED, and FAILED from any of the first three."""

    def __init__(self) -> None:
        #: Written by the replica's main thread only; other threads read it as one value.
        self.state = LifeState.STARTING
        #: Why the replica failed; empty otherwise.
        self.reason = ""

    def __repr__(self) -> str:
        return f"Lifecycle({self.state.name}{f': {self.reason}' if self.reason else ''})"

    def handle(self, event: LifecycleEvent) -> bool:
        """Apply one event; return whether the state changed. An event that doesn't fit the state changes nothing."""
        if self.state in (LifeState.STOPPED, LifeState.FAILED):
            return False
        before = self.state
        match event:
            case EngineLoaded():
                self.state = LifeState.READY if before is LifeState.STARTING else before
            case DrainAsked():
                self.state = LifeState.DRAINING
            case WorkFinished():
                self.state = LifeState.STOPPED if before is LifeState.DRAINING else before
            case EngineDied(reason):
                self.state, self.reason = LifeState.FAILED, reason
        return self.state is not before


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not admitted."""

    kind: FailureKind
    reason: str


def admit(state: LifeState, in_flight: int, limit: int) -> Refusal | None:
    """Admit one more request (None), or refuse it. ``limit`` bounds running and waiting requests together."""
    match state:
        case LifeState.READY if in_flight >= limit:
            return Refusal(FailureKind.OVERLOADED, f"{in_flight} requests are in flight, the bound is {limit}")
        case LifeState.READY:
            return None
        case LifeState.STARTING:
            return Refusal(FailureKind.OVERLOADED, "the replica is still loading its model")
        case LifeState.ASLEEP:
            return Refusal(FailureKind.DRAINING, "the replica is asleep")
        case LifeState.DRAINING | LifeState.STOPPED:
            return Refusal(FailureKind.DRAINING, "the replica is draining")
        case LifeState.FAILED:
            return Refusal(FailureKind.ENGINE, "the replica's engine is dead")


def stalled(busy: bool, now_s: float, progress_at_s: float, stall_after_s: float) -> bool:
    """Whether a busy engine has made no progress for more than ``stall_after_s``. Moments are monotonic seconds."""
    return busy and now_s - progress_at_s > stall_after_s


_STATUS: Final = {
    LifeState.STARTING: ReplicaStatus.STARTING,
    LifeState.READY: ReplicaStatus.UP,
    LifeState.ASLEEP: ReplicaStatus.STARTING,
    LifeState.DRAINING: ReplicaStatus.DRAINING,
    LifeState.STOPPED: ReplicaStatus.DOWN,
    LifeState.FAILED: ReplicaStatus.ERROR,
}


def published_status(state: LifeState, is_stalled: bool) -> ReplicaStatus:
    """The status in the record; a stalled replica must not be picked, so it is ERROR."""
    return ReplicaStatus.ERROR if is_stalled else _STATUS[state]


_NEVER: Final = float("inf")
#: How long a drain waits while etcd doesn't tell which hubs live: those hubs notice the drain by its refusals.
_UNHEARD_TIMEOUT_S: Final = 1.5


class Verdict(StrEnum):
    """The next step of a draining replica."""

    WAIT = "wait"
    #: No request is in flight, and no hub will send another one.
    DONE = "done"
    #: The drain's deadline has passed while requests are in flight.
    GIVE_UP = "give-up"


class Drain:
    """How long a drain waits. Moments are monotonic seconds.

    A drain is done when no request is in flight and every live hub has acknowledged that it no longer picks this
    replica. Acknowledgements are awaited for at most ``ack_timeout_s`` from the start, or 1.5 s if the live hubs are
    unknown; requests in flight are awaited until the earliest deadline of all drain requests.
    """

    def __init__(self, ack_timeout_s: float) -> None:
        self._ack_timeout_s = ack_timeout_s
        #: When a drain was first requested; None before.
        self._began_s: float | None = None
        #: When the requests in flight are failed; never for a drain by the operator's control key.
        self._until_s = _NEVER
        #: Whether every live hub has acknowledged the drain. May be set from any thread.
        self.is_acknowledged = False

    @property
    def is_bounded(self) -> bool:
        """Whether a drain with a deadline was requested."""
        return self._until_s < _NEVER

    def request(self, now_s: float, timeout_s: float) -> None:
        """Start to drain; requests in flight are failed after ``timeout_s``. The earliest deadline wins."""
        if self._began_s is None:
            self._began_s = now_s
        self._until_s = min(self._until_s, now_s + timeout_s)

    def verdict(self, now_s: float, in_flight: int, *, knows_hubs: bool = True) -> Verdict:
        """The next step of a drain. ``knows_hubs``: whether the hubs that must acknowledge it are known."""
        if in_flight:
            return Verdict.GIVE_UP if now_s >= self._until_s else Verdict.WAIT
        began_s = now_s if self._began_s is None else self._began_s
        timeout_s = self._ack_timeout_s if knows_hubs else min(_UNHEARD_TIMEOUT_S, self._ack_timeout_s)
        is_over = now_s >= min(self._until_s, began_s + timeout_s)
        return Verdict.DONE if self.is_acknowledged or is_over else Verdict.WAIT
