"""The frames between a hub and a replica.

One message is a ZMQ multipart: a head frame, then one frame for each attachment. The head is one version byte and a
msgpack map whose ``t`` names the message. Every message carries the epoch of the replica it is meant for or comes from,
so that no frame reaches another life of the same key. Nothing here is ever pickled.

Input socket of the replica:   Hello, Submit, Abort, ReleasePayloads in; Welcome, Accepted, Rejected out.
Output socket of the replica:  Hello in; Welcome, Chunk, StageDone, StageFailed out.
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

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
_StageId = Annotated[int, msgspec.Meta(ge=0, lt=1_000_000_000)]


class FailureKind(StrEnum):
    """Why a stage did not do its work; the hub maps it to a typed error."""

    INVALID = "invalid"
    OVERLOADED = "overloaded"
    DRAINING = "draining"
    ENGINE = "engine"
    PAYLOAD = "payload"
    DEADLINE = "deadline"


class PayloadRef(msgspec.Struct, frozen=True, kw_only=True):
    """Where a stage left its hand-off: enough for the next stage's connector to fetch it."""

    from_stage: _StageId
    to_stage: _StageId
    key: _Name
    connector: _Name
    size_bytes: _Count
    metadata: dict[str, Any] = {}


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="hello"):
    """A hub opens its session with one life of the replica."""

    hub_id: _Name
    epoch: _Count


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="welcome"):
    """The replica is the life that Hello named, and this is its load."""

    epoch: _Count
    capacity: _Count
    queue_length: _Count


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="submit"):
    """Work for the stage.

    ``inputs`` holds ``messages``, ``prompt`` or ``prompt_token_ids`` as the client gave them. ``payloads`` is what the
    stages before left for this one, ``next_stages`` who wants a hand-off. ``remaining_s`` is the time left to the
    request's deadline: lengths survive clocks that disagree. ``attempt`` counts from 0, and each has frames of its own.
    """

    epoch: _Count
    request_id: _Name
    attempt: _Count = 0
    inputs: dict[str, Any] = {}
    params: dict[str, Any] = {}
    payloads: tuple[PayloadRef, ...] = ()
    next_stages: tuple[_StageId, ...] = ()
    remaining_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 600.0


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="abort"):
    """Stop working on a request; answered by StageDone with finish_reason ``abort`` if it was running."""

    epoch: _Count
    request_id: _Name


class ReleasePayloads(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="release"):
    """Nobody will fetch the request's hand-offs any more."""

    epoch: _Count
    request_id: _Name


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


ToReplica = Hello | Submit | Abort | ReleasePayloads
FromReplica = Welcome | Accepted | Rejected | Chunk | StageDone | StageFailed

_encoder = msgspec.msgpack.Encoder()
_to_replica: msgspec.msgpack.Decoder[ToReplica] = msgspec.msgpack.Decoder(ToReplica)
_from_replica: msgspec.msgpack.Decoder[FromReplica] = msgspec.msgpack.Decoder(FromReplica)
_VERSION_BYTE: Final = bytes([VERSION])


def encode(message: ToReplica | FromReplica) -> bytes:
    """The head frame of a message. Raise WireError if a value in it can't be written."""
    try:
        head = _VERSION_BYTE + _encoder.encode(message)
    except (TypeError, OverflowError, ValueError) as error:
        raise WireError(f"can't be encoded: {error}") from error
    if len(head) > MAX_HEAD_BYTES:
        raise WireError(f"{len(head)} bytes are more than the {MAX_HEAD_BYTES} that one message may have")
    return head


def decode_to_replica(frames: Sequence[bytes | memoryview]) -> ToReplica:
    """Read what a hub sent. Raise WireError for anything else; a hub never attaches frames."""
    if len(frames) != 1:
        raise WireError(f"{len(frames)} frames where one was due")
    message: ToReplica = _decode(_to_replica, frames[0])
    return message


def decode_from_replica(frames: Sequence[bytes | memoryview]) -> tuple[FromReplica, Sequence[bytes | memoryview]]:
    """Read what a replica sent: the message and its attachments. Raise WireError for anything else."""
    if not 1 <= len(frames) <= 1 + MAX_ATTACHMENTS:
        raise WireError(f"{len(frames)} frames")
    message: FromReplica = _decode(_from_replica, frames[0])
    attachments = frames[1:]
    if attachments and not isinstance(message, Chunk):
        raise WireError("only a chunk has attachments")
    if any(len(attachment) > MAX_ATTACHMENT_BYTES for attachment in attachments):
        raise WireError(f"an attachment is longer than {MAX_ATTACHMENT_BYTES} bytes")
    return message, attachments


def _decode(decoder: msgspec.msgpack.Decoder[Any], head: bytes | memoryview) -> Any:
    if not 2 <= len(head) <= MAX_HEAD_BYTES:
        raise WireError(f"a head of {len(head)} bytes")
    if head[0] != VERSION:
        raise WireError(f"version {head[0]}; this release speaks {VERSION}")
    try:
        return decoder.decode(head[1:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise WireError(str(error)) from error
