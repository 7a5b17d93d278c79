"""The events of one connection to a replica process, from a StageClient to the orchestrator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from omni_discovery import wire

if TYPE_CHECKING:
    from hub.request.events import StageMessage
    from omni_discovery.records.schema import ReplicaInfo


class ReplicaLink(Protocol):
    """The connection that an event came from, as the event's handlers see it; StageClient implements it."""

    def __hash__(self) -> int: ...

    @property
    def info(self) -> ReplicaInfo:
        """The replica's record as of now: its stage, id and epoch among others."""

    @property
    def addr(self) -> str:
        """The address of its input socket, by which pools know the replica."""

    @property
    def session_up(self) -> bool:
        """Whether the present life of the replica has welcomed this hub on both sockets."""

    def return_credits(self, session: int, count: int) -> None:
        """Answer a Recall of that session. Nothing happens if the session is over."""


# Structs: several are made for each request, and a frozen dataclass costs several times as much to make.
class SessionUp(msgspec.Struct, frozen=True):
    """The replica has welcomed this hub on both sockets. ``gated``: it runs only what it has granted credits for."""

    client: ReplicaLink
    queue_length: int
    gated: bool = False


class SessionDown(msgspec.Struct, frozen=True):
    """The session with the replica has ended. ``lost``: its answers to requests in flight may be lost.

    ``given_up``: it lives, and has ended the session because this hub read nothing.
    """

    client: ReplicaLink
    reason: str
    lost: bool
    given_up: bool = False


class ProcessGone(msgspec.Struct, frozen=True):
    """No process listens at the replica's address any more."""

    client: ReplicaLink


class Unresolved(msgspec.Struct, frozen=True):
    """There is no connection to the replica, because its host's name can't be resolved; empty: it was resolved."""

    client: ReplicaLink
    reason: str


class Granted(msgspec.Struct, frozen=True):
    """The replica has free slots for this hub."""

    client: ReplicaLink
    credits: int
    queue_length: int


class Recalled(msgspec.Struct, frozen=True):
    """The replica recalls up to so many unspent credits of ``session``, for other hubs."""

    client: ReplicaLink
    session: int
    credits: int


class Answered(msgspec.Struct, frozen=True):
    """An answer about one request, with the moment (``time.perf_counter``) its frame was received."""

    client: ReplicaLink
    message: StageMessage
    attachments: tuple[bytes, ...]
    received_at_s: float


class PiecesCame(msgspec.Struct, frozen=True):
    """Pieces of text of one request or many, which came in one frame, at ``received_at_s``, one behind the other.

    What a model has made in one step comes so: in place of an Answered for each.
    """

    client: ReplicaLink
    pieces: Sequence[wire.Chunk]
    received_at_s: float


class Unanswered(msgspec.Struct, frozen=True):
    """A dispatch was neither accepted nor rejected in time. ``is_final``: the hub gives it up in any case."""

    client: ReplicaLink
    request_id: str
    attempt: int
    is_final: bool


class Unsent(msgspec.Struct, frozen=True):
    """A dispatch that was to leave in a batch did not leave: the replica has not seen it."""

    client: ReplicaLink
    request_id: str
    attempt: int


class AbortEnded(msgspec.Struct, frozen=True):
    """The replica has acknowledged an abort, or its process is gone: nothing of the request runs there."""

    client: ReplicaLink
    request_id: str


class Controlled(msgspec.Struct, frozen=True):
    """The answer to a collective call."""

    client: ReplicaLink
    message: wire.ControlResult


class FrameDropped(msgspec.Struct, frozen=True):
    """A frame could not be used; ``reason`` is one word."""

    client: ReplicaLink
    reason: str


class EpochNamed(msgspec.Struct, frozen=True):
    """The replica has named another epoch than before: of several records of one process, that one is its own."""

    client: ReplicaLink


CreditEvent = Granted | Recalled
SessionEvent = SessionUp | SessionDown | ProcessGone | Unresolved | EpochNamed
AnswerEvent = Answered | PiecesCame
ClientEvent = CreditEvent | SessionEvent | AnswerEvent | Controlled | Unanswered | Unsent | FrameDropped | AbortEnded
