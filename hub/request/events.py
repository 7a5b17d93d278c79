"""What a RequestMachine is told and what it asks for: frozen events and actions. Pure.

Every event that speaks of a dispatch carries its ``attempt``; one of an attempt that is over changes nothing.

What a RequestMachine is told of pieces of a hand-off, and what it asks for. Pure.

What a RequestMachine is told where its input comes in segments. Pure; part of request_events.py.

What a RequestMachine is told of companions, and what it asks for. Pure; part of request_events.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hub.request.outputs import OmniOutput
from omni_discovery import wire
from omni_discovery.errors import RequestError


@dataclass(frozen=True, slots=True)
class ClientBackpressure:
    """The client has fallen behind what is made for it, or has caught up."""

    is_behind: bool


@dataclass(frozen=True, slots=True)
class Pause:
    """Tell the stage's replica to make no more output of the request, or with ``paused`` False to go on."""

    stage_id: int
    attempt: int
    replica: ReplicaRef
    paused: bool


@dataclass(frozen=True, slots=True)
class HandOffPiece:
    """A stage has made a piece of its hand-off."""

    stage_id: int
    attempt: int
    message: wire.HandOffPiece


@dataclass(frozen=True, slots=True)
class PieceTaken:
    """A stage has taken all pieces of ``from_stage`` up to and with ``number``."""

    stage_id: int
    attempt: int
    from_stage: int
    number: int


@dataclass(frozen=True, slots=True)
class FeedInput:
    """Pass a piece on to the stage's replica; ``payload`` None: there are no more, and this would be its number."""

    stage_id: int
    attempt: int
    replica: ReplicaRef
    from_stage: int
    number: int
    payload: wire.PayloadRef | None


@dataclass(frozen=True, slots=True)
class PieceRoom:
    """Tell the stage's replica that ``to_stage`` has taken all pieces before ``number``; see wire.PieceRoom."""

    stage_id: int
    attempt: int
    replica: ReplicaRef
    to_stage: int
    number: int
    again: bool = False


@dataclass(frozen=True, slots=True)
class SegmentArrived:
    """The client's next segment; ``inputs`` None: there are no more."""

    inputs: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class SegmentDone:
    """A stage is through with a segment and waits for the next one."""

    stage_id: int
    attempt: int
    message: wire.SegmentDone
    received_at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SessionBack:
    """What was said to the replica since its session was lost may not have come there."""

    stage_id: int
    attempt: int


@dataclass(frozen=True, slots=True)
class CompanionDone:
    """A companion has run, and this is its hand-off."""

    role: str
    payloads: tuple[wire.PayloadRef, ...]


@dataclass(frozen=True, slots=True)
class CompanionFailed:
    """A companion can't be had."""

    role: str
    error: RequestError


@dataclass(frozen=True, slots=True)
class StartCompanions:
    """Begin the request's companions, beside it."""

    given: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class StopCompanions:
    """Stop them, and free what they left."""


@dataclass(frozen=True, slots=True)
class Collected:
    """A companion is done: its parent gets its hand-off, and says when that is not needed any more."""

    payloads: tuple[wire.PayloadRef, ...]


@dataclass(frozen=True, slots=True)
class ReplicaRef:
    """One life of one replica, as a request remembers it."""

    stage_id: int
    replica_id: int
    epoch: int
    input_addr: str

    def __str__(self) -> str:
        return f"{self.stage_id}/{self.replica_id}"


@dataclass(frozen=True, slots=True)
class Submitted:
    """The request is admitted: begin."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A dispatch has left for a replica."""

    stage_id: int
    attempt: int
    replica: ReplicaRef


@dataclass(frozen=True, slots=True)
class Accepted:
    """The replica has the work."""

    stage_id: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """The replica will not do it; nothing has run."""

    stage_id: int
    attempt: int
    kind: wire.FailureKind
    reason: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a stage's output, with the moment its frame was received."""

    stage_id: int
    attempt: int
    message: wire.Chunk
    attachments: Sequence[bytes] = ()
    received_at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StageDone:
    """A stage is through with the request."""

    stage_id: int
    attempt: int
    message: wire.StageDone
    received_at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StageFailed:
    """A stage took the work and could not finish it."""

    stage_id: int
    attempt: int
    kind: wire.FailureKind
    reason: str


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """The dispatch will not be answered.

    ``may_have_run`` is false if it never left this process. ``avoid_addr`` is the replica's input address where it
    still looks reachable, so that the next pick must be kept off it; ``is_slow``: for no worse than a late answer, so
    that it is better than nobody.
    """

    stage_id: int
    attempt: int
    reason: str
    may_have_run: bool = True
    avoid_addr: str = ""
    is_slow: bool = False


@dataclass(frozen=True, slots=True)
class StageUnavailable:
    """No replica could be picked for the dispatch."""

    stage_id: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class DispatchRefused:
    """The dispatch can't be written as a frame: the request itself is wrong."""

    stage_id: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The request's time is over."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client has left or asked to stop; with ``error``, the hub ends the request for a reason of its own."""

    error: RequestError | None = None


StageEvent = (
    Sent
    | Accepted
    | Rejected
    | Chunk
    | HandOffPiece
    | PieceTaken
    | StageDone
    | SegmentDone
    | SessionBack
    | StageFailed
    | ReplicaLost
    | StageUnavailable
    | DispatchRefused
)
Event = (
    Submitted
    | StageEvent
    | CompanionDone
    | CompanionFailed
    | SegmentArrived
    | ClientBackpressure
    | DeadlinePassed
    | Cancelled
)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Pick a replica of the stage, none of ``avoid`` (input addresses), and send it the work.

    Those in ``slow`` are taken only if there is nobody else who can serve.

    ``resume`` is what the client has seen of the stage's answer: the replica goes on behind it. ``is_retry``: the work
    may have run before, so it draws on the retry budget. ``segmented``: more input may come, by Update.
    """

    stage_id: int
    attempt: int
    inputs: Mapping[str, Any]
    params: Mapping[str, Any]
    payloads: tuple[wire.PayloadRef, ...]
    next_stages: tuple[int, ...]
    avoid: frozenset[str]
    slow: frozenset[str] = frozenset()
    resume: wire.Resume | None = None
    priority: int = 0
    is_retry: bool = False
    stream_from: tuple[int, ...] = ()
    stream_to: tuple[int, ...] = ()
    segmented: bool = False


@dataclass(frozen=True, slots=True)
class Update:
    """Send a stage its next segment, to the replica that has the ones before; ``is_last``: there are no more."""

    stage_id: int
    attempt: int
    replica: ReplicaRef | None
    segment: int
    inputs: Mapping[str, Any]
    payloads: tuple[wire.PayloadRef, ...]
    is_last: bool
    kept_from: int = 0


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop the stage's work. ``replica`` None: it was still being picked."""

    stage_id: int
    attempt: int
    replica: ReplicaRef | None


@dataclass(frozen=True, slots=True)
class Emit:
    """Hand an output to the client."""

    output: OmniOutput


@dataclass(frozen=True, slots=True)
class ReleasePayload:
    """Nobody will fetch what the request left at this replica."""

    stage_id: int
    replica: ReplicaRef


@dataclass(frozen=True, slots=True)
class Drop:
    """A frame was of no use; count it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Retry:
    """A stage's work is done again, or with ``resumed`` continued; count it."""

    stage_id: int
    resumed: bool = False


class Outcome(StrEnum):
    """How a request ended."""

    OK = "ok"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Finish:
    """The request is over; the last action of every machine."""

    outcome: Outcome
    error: RequestError | None = None


Action = (
    Dispatch
    | Update
    | Abort
    | Emit
    | ReleasePayload
    | FeedInput
    | PieceRoom
    | Pause
    | StartCompanions
    | StopCompanions
    | Collected
    | Drop
    | Retry
    | Finish
)
