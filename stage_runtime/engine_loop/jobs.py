"""The messages between the ZMQ thread and the engine's thread: jobs one way, outcomes the other.

Every request that was accepted has a ``key`` of its own in this replica; exactly one Finished or RequestFailed ends
it. These are structs because every token makes one, and a frozen dataclass takes several times as long to make.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from omni_discovery.wire import FailureKind, PayloadRef, Resume, TokenLogprobs, ToolAnswer

#: The control method that puts an engine to sleep: the server and the engine's loop both treat it on its own.
SLEEP: Final = "sleep"


def owner_of(hub_id: str, request_id: str) -> str:
    """The owner of a hub's request over all its attempts: hand-offs are kept and released under this name."""
    return f"{hub_id}/{request_id}"


class Work(msgspec.Struct, frozen=True):
    """A request was accepted. ``owner`` names the hub's request over all its attempts."""

    key: str
    owner: str
    request_id: str
    attempt: int
    inputs: Mapping[str, Any]
    params: Mapping[str, Any]
    payloads: tuple[PayloadRef, ...]
    next_stages: tuple[int, ...]
    accepted_at_s: float
    deadline_s: float
    #: What the client has seen of the answer already; None: begin at the beginning.
    resume: Resume | None = None
    priority: int = 0
    #: Of a request that comes in segments, which one this is.
    segment: int | None = None
    #: The stages that send pieces of their hand-off, and those of ``next_stages`` that take pieces.
    stream_from: tuple[int, ...] = ()
    stream_to: tuple[int, ...] = ()
    #: The hub's span of it, as the W3C's header names it; empty where nothing is traced.
    trace: str = ""
    client: str = ""


class PieceArrived(msgspec.Struct, frozen=True):
    """A stage before has made piece ``number``; with ``is_last`` there is no such piece, and all have come."""

    key: str
    from_stage: int
    number: int
    payload: PayloadRef | None
    is_last: bool


class WindowUpdate(msgspec.Struct, frozen=True):
    """A next stage has taken all pieces before ``number``; ``again``: those from there on may be lost on their way."""

    key: str
    to_stage: int
    number: int
    again: bool = False


class Pause(msgspec.Struct, frozen=True):
    """The client is behind with what was made of the request: make no more of it; ``paused`` False: go on."""

    key: str
    paused: bool


class HoldBack(msgspec.Struct, frozen=True):
    """The hub is behind with the outputs of all its requests: make no more of this one; ``held`` False: go on."""

    key: str
    held: bool


class NextSegment(msgspec.Struct, frozen=True):
    """Go on with a request that waits for its next segment; with ``is_last`` there is none: end it.

    What it handed over for segments before ``kept_from`` is needed no more.
    """

    key: str
    segment: int
    inputs: Mapping[str, Any]
    payloads: tuple[PayloadRef, ...]
    is_last: bool = False
    kept_from: int = 0


class Cancel(msgspec.Struct, frozen=True):
    """Stop the request; its end is Finished with ``abort``."""

    key: str


class ReleasePayload(msgspec.Struct, frozen=True):
    """Free the hand-offs that the owner's request left for other stages: no stage will fetch them."""

    owner: str


class ReleaseHub(msgspec.Struct, frozen=True):
    """Free the hand-offs of all requests of one hub."""

    hub_id: str


class Call(msgspec.Struct, frozen=True):
    """Call a control method of the engine; exactly one Called answers it. A Cancel by its key spares it."""

    key: str
    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    deadline_s: float


class Wake(msgspec.Struct, frozen=True):
    """Look at the flags: the replica is to drain or to stop."""


#: Hand-offs by the role of their companion (empty: the request's own) and by their stage.
HandOffs = Mapping[str, Mapping[int, Mapping[str, Any]]]


class Fetched(msgspec.Struct, frozen=True):
    """Hand-offs have come, or can't be had; ``fetch`` is the number of the fetch.

    ``took_s`` is how long it took its thread; None if it was given up, or never had one.
    """

    fetch: int
    result: HandOffs | Exception
    took_s: float | None = None


Job = (
    Work
    | NextSegment
    | PieceArrived
    | WindowUpdate
    | Pause
    | HoldBack
    | Cancel
    | ReleasePayload
    | ReleaseHub
    | Call
    | Fetched
    | Wake
)


class OutputChunk(msgspec.Struct, frozen=True):
    """Some output of a request. An image or other binary comes as ``attachment`` of the type ``mime``."""

    key: str
    modality: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    mime: str = ""
    attachment: bytes | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    partial_image: int | None = None


class HandedPiece(msgspec.Struct, frozen=True):
    """A piece of the hand-off is stored for the next stages."""

    key: str
    number: int
    payloads: tuple[PayloadRef, ...]


class TookPiece(msgspec.Struct, frozen=True):
    """The engine has all pieces of a stage before up to and with ``number``."""

    key: str
    from_stage: int
    number: int


class Finished(msgspec.Struct, frozen=True):
    """The request ended as it should, or was cancelled."""

    key: str
    finish_reason: str
    payloads: tuple[PayloadRef, ...] = ()
    usage: Mapping[str, int] = {}
    timings_s: Mapping[str, float] = {}
    stop_reason: int | str | None = None
    called: ToolAnswer | None = None


class SegmentEnded(msgspec.Struct, frozen=True):
    """The answer to a segment is complete; the request stays, for the next one."""

    key: str
    finish_reason: str
    payloads: tuple[PayloadRef, ...] = ()
    usage: Mapping[str, int] = {}


class RequestFailed(msgspec.Struct, frozen=True):
    """The request failed; ``reason`` goes to the hub as it is.

    ``status``: the HTTP status if the kind is INVALID. ``from_stage``: whose hand-off was the cause, if one was.
    """

    key: str
    kind: FailureKind
    reason: str
    status: int = 400
    from_stage: int | None = None


class Parked(msgspec.Struct, frozen=True):
    """The engine has parked a paused request, so its slot is free; with ``is_parked`` False it takes a slot again."""

    key: str
    is_parked: bool


class Called(msgspec.Struct, frozen=True):
    """A Call has ended. ``is_asleep`` says whether the engine sleeps, after those that may have changed that."""

    key: str
    ok: bool
    result: Any = None
    error: str = ""
    is_asleep: bool | None = None


#: What the server reports to the hub about one request.
Report = OutputChunk | HandedPiece | TookPiece | SegmentEnded | Finished | RequestFailed
Outcome = Report | Parked | Called
