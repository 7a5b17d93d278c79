"""Frames: how the messages between a hub and a replica are encoded and decoded. Pure.

A ZMQ multipart is a head frame, then one frame for each attachment. The head is one version byte and a msgpack map
whose ``t`` names the message, or an array of such maps: a batch, which has no attachments and is handled in order.

Where both sides take it (``VERSION_CUT``), a message with a frame of more than ``MAX_FRAME_BYTES`` is cut. First comes
a frame of that version byte and a msgpack array of the lengths of its frames; each of these follows in pieces of
``MAX_FRAME_BYTES``, the last one shorter. A frame of no bytes has no piece.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec

from omni_discovery.errors import WireError
from omni_discovery.text import shortened
from omni_discovery.wire.containers import MAX_CONTAINERS, MAX_CONTAINERS_TO_REPLICA, has_too_many_containers
from omni_discovery.wire.messages import (
    MAX_ATTACHMENT_BYTES,
    MAX_ATTACHMENTS,
    MAX_BATCH,
    MAX_FRAME_BYTES,
    MAX_HEAD_BYTES,
    VERSION,
    VERSION_CUT,
    Chunk,
    FromReplica,
    ToReplica,
)

__all__ = [
    "cut",
    "decode_from_replica",
    "decode_to_replica",
    "encode",
    "epochs_of",
    "join",
    "lengths_of",
    "most_pieces",
    "put_together",
    "shortened",
    "takes_cut",
]

_encoder = msgspec.msgpack.Encoder()
_to_replica: msgspec.msgpack.Decoder[ToReplica | list[ToReplica]] = msgspec.msgpack.Decoder(ToReplica | list[ToReplica])
_from_replica: msgspec.msgpack.Decoder[FromReplica | list[FromReplica]] = msgspec.msgpack.Decoder(
    FromReplica | list[FromReplica]
)
_VERSION_BYTE: Final = bytes([VERSION])
_CUT_BYTE: Final = bytes([VERSION_CUT])
_Lengths = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, le=MAX_ATTACHMENT_BYTES)]],
    msgspec.Meta(min_length=1, max_length=1 + MAX_ATTACHMENTS),
]
_lengths: msgspec.msgpack.Decoder[list[int]] = msgspec.msgpack.Decoder(_Lengths)


class _Envelope(msgspec.Struct):
    """What all messages have, read without what else is in them."""

    epoch: int


_envelopes: msgspec.msgpack.Decoder[_Envelope | list[_Envelope]] = msgspec.msgpack.Decoder(_Envelope | list[_Envelope])
#: The beginning of a single message as ``encode`` writes it, up to its epoch.
_BEGINNING: Final = re.compile(
    rb"\x01(?:[\x80-\x8f]|\xde.{2})\xa1t[\xa0-\xbf][a-z]{1,31}\xa5epoch"
    rb"([\x00-\x7f]|\xcc.|\xcd.{2}|\xce.{4}|\xcf.{8})",
    re.DOTALL,
)


def encode(message: ToReplica | FromReplica | Sequence[ToReplica | FromReplica]) -> bytes:
    """The head frame of a message, or of a batch. Raise WireError if a value in it can't be encoded."""
    try:
        head = _VERSION_BYTE + _encoder.encode(message)
    except (TypeError, OverflowError, ValueError, RecursionError) as error:
        raise WireError(f"can't be encoded: {error}") from error
    if len(head) <= MAX_CONTAINERS_TO_REPLICA:
        return head
    if len(head) > MAX_HEAD_BYTES:
        raise WireError(f"{len(head)} bytes are more than the {MAX_HEAD_BYTES} that one message may have")
    if has_too_many_containers(head, MAX_CONTAINERS_TO_REPLICA):
        raise WireError(f"it has more than the {MAX_CONTAINERS_TO_REPLICA} maps, arrays and texts of one message")
    return head


def join(heads: Sequence[bytes]) -> bytes:
    """One head frame made of the head frames of at most ``MAX_BATCH`` single messages."""
    count = len(heads)
    if count == 1:
        return heads[0]
    length = bytes([0x90 | count]) if count < 16 else b"\xdc" + count.to_bytes(2, "big")
    return b"".join([_VERSION_BYTE, length, *[head[1:] for head in heads]])


def takes_cut(wire_version: int | msgspec.UnsetType) -> bool:
    """Whether who names this version, in a record or in Hello, takes messages that are cut; unset is the first."""
    return wire_version is not msgspec.UNSET and wire_version >= VERSION_CUT


def cut(frames: Sequence[bytes]) -> Sequence[bytes | memoryview]:
    """The frames of a message in pieces of at most ``MAX_FRAME_BYTES``; as they are where none is longer."""
    if max(map(len, frames)) <= MAX_FRAME_BYTES:
        return frames
    pieces = [
        memoryview(frame)[begin : begin + MAX_FRAME_BYTES]
        for frame in frames
        for begin in range(0, len(frame), MAX_FRAME_BYTES)
    ]
    return [_CUT_BYTE + _encoder.encode(list(map(len, frames))), *pieces]


def lengths_of(first: bytes) -> list[int] | None:
    """The lengths of the frames of a message that is cut, as its first frame says; None for any other message.

    Raise WireError if they are beyond what a message may have.
    """
    if first[:1] != _CUT_BYTE:
        return None
    try:
        lengths = _lengths.decode(memoryview(first)[1:])
    except (msgspec.DecodeError, OverflowError) as error:
        raise WireError(f"cut, and not into frames of a message: {error}") from error
    if lengths[0] > MAX_HEAD_BYTES:
        raise WireError(f"cut, with a head of {lengths[0]} bytes")
    return lengths


def most_pieces(lengths: Sequence[int]) -> int:
    """How many pieces frames of these lengths are cut into."""
    return sum(-(-length // MAX_FRAME_BYTES) for length in lengths)


def put_together(lengths: Sequence[int], pieces: Sequence[bytes]) -> list[bytes]:
    """The frames of a message that was cut. Raise WireError if the pieces are not as long as was said."""
    frames, begin = [], 0
    for length in lengths:
        end = begin + most_pieces([length])
        frame = pieces[begin] if end - begin == 1 and end <= len(pieces) else b"".join(pieces[begin:end])
        if len(frame) != length:
            raise WireError(f"cut, with {len(frame)} bytes where {length} were said")
        frames.append(frame)
        begin = end
    if begin != len(pieces):
        raise WireError(f"cut, with {len(pieces)} pieces where {begin} were said")
    return frames


def decode_to_replica(frames: Sequence[bytes | memoryview]) -> list[ToReplica]:
    """Decode a multipart of a hub: its messages in order. Raise WireError; a hub never attaches frames."""
    if len(frames) != 1:
        raise WireError(f"{len(frames)} frames where one was due")
    head = frames[0]
    is_long = MAX_CONTAINERS_TO_REPLICA < len(head) <= MAX_HEAD_BYTES
    if is_long and has_too_many_containers(bytes(head), MAX_CONTAINERS_TO_REPLICA):
        raise WireError(f"a head of more than {MAX_CONTAINERS_TO_REPLICA} maps, arrays and texts")
    messages: list[ToReplica] = _decode(_to_replica, head)
    return messages


def epochs_of(head: bytes) -> list[int]:
    """The epochs that the messages of one head name, of which nothing else is decoded. Raise WireError.

    Of a message that names several, which ``encode`` writes never, it is the first or the last.
    """
    begin = _BEGINNING.match(head)
    if begin is not None:
        return [int.from_bytes(begin[1] if len(begin[1]) == 1 else begin[1][1:], "big")]
    return [each.epoch for each in _decode(_envelopes, head)]


def decode_from_replica(
    frames: Sequence[bytes | memoryview],
) -> tuple[list[FromReplica], Sequence[bytes | memoryview]]:
    """Decode a multipart of a replica: messages in order, and the attachments of a single Chunk. Raise WireError."""
    if not 1 <= len(frames) <= 1 + MAX_ATTACHMENTS:
        raise WireError(f"{len(frames)} frames")
    head = frames[0]
    # Beyond the bound, counting costs more than refusing.
    if len(head) <= MAX_HEAD_BYTES and has_too_many_containers(bytes(head)):
        raise WireError(f"a head of more than {MAX_CONTAINERS} maps, arrays and texts")
    messages: list[FromReplica] = _decode(_from_replica, head)
    attachments = frames[1:]
    if not attachments:
        return messages, attachments
    if not (len(messages) == 1 and isinstance(messages[0], Chunk)):
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
