"""What a StageClient tells the orchestrator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hub.request import events as ev
from omni_discovery import wire

if TYPE_CHECKING:
    from hub.replicas.stage_client import StageClient

_Piece = wire.HandOffPiece | wire.PieceTaken
Answer = wire.Accepted | wire.Rejected | wire.Chunk | _Piece | wire.StageDone | wire.SegmentDone | wire.StageFailed


@dataclass(frozen=True, slots=True)
class SessionUp:
    """The replica has welcomed this hub on both sockets."""

    client: StageClient
    queue_length: int
    #: Whether it runs only what it has granted credits for.
    gated: bool = False


@dataclass(frozen=True, slots=True)
class Granted:
    """The replica has free slots for this hub."""

    client: StageClient
    credits: int
    queue_length: int


@dataclass(frozen=True, slots=True)
class Recalled:
    """The replica wants unspent credits back, for others."""

    client: StageClient
    session: int
    credits: int


@dataclass(frozen=True, slots=True)
class AbortEnded:
    """Nothing of the request runs at the replica any more, or there is nobody left to ask."""

    client: StageClient
    request_id: str


@dataclass(frozen=True, slots=True)
class SessionDown:
    """The replica can't be talked to. ``lost``: some of its answers to what is in flight may be lost."""

    client: StageClient
    reason: str
    lost: bool


@dataclass(frozen=True, slots=True)
class ProcessGone:
    """Nobody listens any more where the replica was."""

    client: StageClient


@dataclass(frozen=True, slots=True)
class Answered:
    """A frame about one request, with the moment (``perf_counter``) it was received."""

    client: StageClient
    message: Answer
    attachments: tuple[bytes, ...]
    received_at_s: float

    def event(self) -> ev.StageEvent:
        """What it means to the request."""
        stage_id, message = self.client.info.stage_id, self.message
        match message:
            case wire.Accepted():
                return ev.Accepted(stage_id, message.attempt)
            case wire.Rejected():
                return ev.Rejected(stage_id, message.attempt, message.kind, message.reason)
            case wire.Chunk():
                return ev.Chunk(stage_id, message.attempt, message, self.attachments, self.received_at_s)
            case wire.HandOffPiece():
                return ev.HandOffPiece(stage_id, message.attempt, message)
            case wire.PieceTaken():
                return ev.PieceTaken(stage_id, message.attempt, message.from_stage, message.number)
            case wire.StageDone():
                return ev.StageDone(stage_id, message.attempt, message, self.received_at_s)
            case wire.SegmentDone():
                return ev.SegmentDone(stage_id, message.attempt, message, self.received_at_s)
            case wire.StageFailed():
                return ev.StageFailed(stage_id, message.attempt, message.kind, message.reason)


@dataclass(frozen=True, slots=True)
class Controlled:
    """The answer to a collective call."""

    client: StageClient
    message: wire.ControlResult


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A dispatch was neither accepted nor rejected in time. ``is_final``: it is given up, come what may."""

    client: StageClient
    request_id: str
    attempt: int
    is_final: bool


@dataclass(frozen=True, slots=True)
class Unsent:
    """A dispatch that was to leave with others did not: nobody has seen it."""

    client: StageClient
    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class FrameDropped:
    """A frame could not be used; ``reason`` is one word."""

    client: StageClient
    reason: str


CreditEvent = Granted | Recalled
SessionEvent = SessionUp | SessionDown | ProcessGone
ClientEvent = CreditEvent | SessionEvent | Answered | Controlled | Unanswered | Unsent | FrameDropped | AbortEnded
