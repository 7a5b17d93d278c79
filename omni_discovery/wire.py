"""The frames between a hub and a replica.

A ZMQ multipart is a head frame, then one frame for each attachment. The head is one version byte and a msgpack map
whose ``t`` names the message, or an array of such maps: a batch, which attaches nothing and is read from its front.
Every message carries the epoch of the replica it is meant for or comes from, so that no frame reaches another life of
the same key. Nothing here is ever pickled.

Input socket of the replica:   Hello, Submit, Abort, ReleasePayloads, WantCredits, ReturnCredits in; Welcome, Accepted,
                               Rejected, Aborted out.
Output socket of the replica:  Hello in; Welcome, Grant, Recall, Chunk, StageDone, StageFailed out.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, Final

import msgspec

from omni_discovery.errors import WireError

VERSION: Final = 1

#: Longest head frame that is looked at; prompts travel in it, tensors and images do not.
MAX_HEAD_BYTES: Final = 4 << 20
#: Longest attachment, and how many one message may have.
MAX_ATTACHMENT_BYTES: Final = 64 << 20
MAX_ATTACHMENTS: Final = 16
#: How many messages one batch may have.
MAX_BATCH: Final = 1024
MAX_PRIORITY: Final = 1_000_000

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
_StageId = Annotated[int, msgspec.Meta(ge=0, lt=1_000_000_000)]
_Priority = Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]


class FailureKind(StrEnum):
    """Why a stage did not do its work; the hub maps it to a typed error."""

    INVALID = "invalid"
    OVERLOADED = "overloaded"
    DRAINING = "draining"
    ENGINE = "engine"
    PAYLOAD = "payload"
    DEADLINE = "deadline"
    #: The stage can't go on from what the client has seen of the request; the reason says what stands in the way.
    NOT_RESUMABLE = "not_resumable"


class PayloadRef(msgspec.Struct, frozen=True, kw_only=True):
    """Where a stage left its hand-off: enough for the next stage's connector to fetch it."""

    from_stage: _StageId
    to_stage: _StageId
    key: _Name
    connector: _Name
    size_bytes: _Count
    metadata: dict[str, Any] = {}


class Resume(msgspec.Struct, frozen=True, kw_only=True):
    """What the client has been shown of the stage's output: go on behind it, without repeating any of it."""

    token_ids: tuple[int, ...] = ()
    text: str = ""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="hello"):
    """A hub opens its session with one life of the replica.

    ``session`` counts the hub's sessions with this process: credits of an earlier one are void.
    """

    hub_id: _Name
    epoch: _Count
    session: _Count = 0


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="welcome"):
    """The replica is the life that Hello named, and this is its load."""

    epoch: _Count
    capacity: _Count
    queue_length: _Count
    session: _Count = 0


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="submit"):
    """Work for the stage.

    ``inputs`` holds ``messages``, ``prompt`` or ``prompt_token_ids`` as the client gave them. ``payloads`` is what the
    stages before left for this one, ``next_stages`` who wants a hand-off. ``remaining_s`` is the time left to the
    request's deadline: lengths survive clocks that disagree. ``attempt`` counts from 0, and each has frames of its own.
    ``resume`` continues an answer that another replica began. ``credit`` says that the hub spends a credit of its
    present session on it; one without is taken, too, within the replica's own bound. Lower ``priority`` goes first.
    """

    epoch: _Count
    request_id: _Name
    attempt: _Count = 0
    inputs: dict[str, Any] = {}
    params: dict[str, Any] = {}
    payloads: tuple[PayloadRef, ...] = ()
    next_stages: tuple[_StageId, ...] = ()
    remaining_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 600.0
    resume: Resume | None = None
    credit: bool = False
    priority: _Priority = 0


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="abort"):
    """Stop working on a request, up to and with ``attempt``. Always answered by Aborted.

    What was running ends with StageDone, finish_reason ``abort``, besides.
    """

    epoch: _Count
    request_id: _Name
    attempt: _Count = (1 << 53) - 1


class ReleasePayloads(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="release"):
    """Nobody will fetch the request's hand-offs any more."""

    epoch: _Count
    request_id: _Name


class WantCredits(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="want"):
    """The hub has ``waiting`` requests that this replica could serve, the oldest for ``oldest_wait_s``; 0: no more."""

    epoch: _Count
    session: _Count
    waiting: _Count
    oldest_wait_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0


class ReturnCredits(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="return"):
    """The answer to a Recall: so many of the credits it named were not spent, and are the replica's again."""

    epoch: _Count
    session: _Count
    credits: _Count


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="accepted"):
    """The replica has the request and will answer it."""

    epoch: _Count
    request_id: _Name
    queue_length: _Count
    attempt: _Count = 0


class Rejected(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="rejected"):
    """The replica will not do it; nothing has run."""

    epoch: _Count
    request_id: _Name
    kind: FailureKind
    reason: str
    queue_length: _Count
    attempt: _Count = 0


class Aborted(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="aborted"):
    """The Abort has arrived, and nothing of the request up to that attempt runs on; ``running``: something did."""

    epoch: _Count
    request_id: _Name
    attempt: _Count
    running: bool
    queue_length: _Count


class Grant(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="grant"):
    """The hub may send ``credits`` more requests, each to run at once. Void if ``session`` is not its present one."""

    epoch: _Count
    session: _Count
    credits: _Count
    queue_length: _Count


class Recall(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="recall"):
    """Others wait: give up to ``credits`` unspent ones back, at once, by ReturnCredits."""

    epoch: _Count
    session: _Count
    credits: _Count
    queue_length: _Count


class Chunk(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="chunk"):
    """A piece of output; ``seq`` counts from 0 without a gap. An image comes as one attachment of type ``mime``."""

    epoch: _Count
    request_id: _Name
    seq: _Count
    modality: _Name
    queue_length: _Count
    attempt: _Count = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    mime: str = ""


class StageDone(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="done"):
    """The stage is through with the request. No payload for a next stage means that it has nothing to do.

    ``usage`` counts tokens, ``timings_s`` holds seconds by name (queue, first_output, generate, transfer).
    """

    epoch: _Count
    request_id: _Name
    seq: _Count
    finish_reason: str
    queue_length: _Count
    attempt: _Count = 0
    payloads: tuple[PayloadRef, ...] = ()
    usage: dict[str, int] = {}
    timings_s: dict[str, float] = {}


class StageFailed(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="failed"):
    """The stage accepted the request and could not finish it."""

    epoch: _Count
    request_id: _Name
    kind: FailureKind
    reason: str
    queue_length: _Count
    attempt: _Count = 0


ToReplica = Hello | Submit | Abort | ReleasePayloads | WantCredits | ReturnCredits
FromReplica = Welcome | Accepted | Rejected | Aborted | Grant | Recall | Chunk | StageDone | StageFailed

_encoder = msgspec.msgpack.Encoder()
_to_replica: msgspec.msgpack.Decoder[ToReplica | list[ToReplica]] = msgspec.msgpack.Decoder(ToReplica | list[ToReplica])
_from_replica: msgspec.msgpack.Decoder[FromReplica | list[FromReplica]] = msgspec.msgpack.Decoder(
    FromReplica | list[FromReplica]
)
_VERSION_BYTE: Final = bytes([VERSION])


def encode(message: ToReplica | FromReplica | Sequence[ToReplica | FromReplica]) -> bytes:
    """The head frame of a message, or of a batch. Raise WireError if a value in it can't be written."""
    try:
        head = _VERSION_BYTE + _encoder.encode(message)
    except (TypeError, OverflowError, ValueError) as error:
        raise WireError(f"can't be encoded: {error}") from error
    if len(head) > MAX_HEAD_BYTES:
        raise WireError(f"{len(head)} bytes are more than the {MAX_HEAD_BYTES} that one message may have")
    return head


def decode_to_replica(frames: Sequence[bytes | memoryview]) -> list[ToReplica]:
    """Read what a hub sent, in order. Raise WireError for anything else; a hub never attaches frames."""
    if len(frames) != 1:
        raise WireError(f"{len(frames)} frames where one was due")
    messages: list[ToReplica] = _decode(_to_replica, frames[0])
    return messages


def decode_from_replica(
    frames: Sequence[bytes | memoryview],
) -> tuple[list[FromReplica], Sequence[bytes | memoryview]]:
    """Read what a replica sent: messages in order, and the attachments of the only one. Raise WireError."""
    if not 1 <= len(frames) <= 1 + MAX_ATTACHMENTS:
        raise WireError(f"{len(frames)} frames")
    messages: list[FromReplica] = _decode(_from_replica, frames[0])
    attachments = frames[1:]
    if attachments and not (len(messages) == 1 and isinstance(messages[0], Chunk)):
        raise WireError("only a chunk has attachments")
    if any(len(attachment) > MAX_ATTACHMENT_BYTES for attachment in attachments):
        raise WireError(f"an attachment is longer than {MAX_ATTACHMENT_BYTES} bytes")
    return messages, attachments


def _decode(decoder: msgspec.msgpack.Decoder[Any], head: bytes | memoryview) -> list[Any]:
    if not 2 <= len(head) <= MAX_HEAD_BYTES:
        raise WireError(f"a head of {len(head)} bytes")
    if head[0] != VERSION:
        raise WireError(f"version {head[0]}; this release speaks {VERSION}")
    try:
        read = decoder.decode(memoryview(head)[1:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise WireError(str(error)) from error
    if not isinstance(read, list):
        return [read]
    if not 1 <= len(read) <= MAX_BATCH:
        raise WireError(f"a batch of {len(read)} messages")
    return read
