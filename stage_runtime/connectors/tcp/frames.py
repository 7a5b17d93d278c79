"""The frames of a connection that fetches one hand-off. All numbers are little-endian.

    consumer: magic, whether it consumes, the hand-off's generation, its token              64 bytes
    producer: magic, status, size of what follows                                           24 bytes
    producer: the hand-off                                                                  size bytes
    consumer, only if it consumes: one byte, once it has received all

A wrong token, or anything that is no request, is answered by closing the connection.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

from stage_runtime.connectors.store.layout import GENERATION_BYTES, TOKEN_BYTES

RECEIVED: Final = b"\x06"

_REQUEST: Final = struct.Struct(f"<8sB7x{GENERATION_BYTES}s{TOKEN_BYTES}s")
_ANSWER: Final = struct.Struct("<8sB7xQ")
_ASKS: Final = b"OMNIGET1"
_SAYS: Final = b"OMNIGOT1"

REQUEST_BYTES: Final = _REQUEST.size
ANSWER_BYTES: Final = _ANSWER.size


class Status(IntEnum):
    """Whether the hand-off follows."""

    HERE = 0
    GONE = 1


def pack_request(generation: bytes, token: bytes, *, consume: bool) -> bytes:
    """A request frame of ``REQUEST_BYTES``."""
    return _REQUEST.pack(_ASKS, consume, generation, token)


def parse_request(content: bytes) -> tuple[bytes, bytes, bool] | None:
    """Generation, token and whether it consumes; None if ``content``, of ``REQUEST_BYTES``, is no request."""
    magic, consume, generation, token = _REQUEST.unpack(content)
    return (generation, token, bool(consume)) if magic == _ASKS and consume in (0, 1) else None


def pack_answer(status: Status, size_bytes: int) -> bytes:
    """An answer frame of ``ANSWER_BYTES``, which the hand-off follows."""
    return _ANSWER.pack(_SAYS, status, size_bytes)


def parse_answer(content: bytes) -> tuple[Status, int] | None:
    """Status and size in bytes; None if ``content``, of ``ANSWER_BYTES``, is no answer."""
    magic, status, size_bytes = _ANSWER.unpack(content)
    if magic != _SAYS or status not in Status.__members__.values():
        return None
    return Status(status), size_bytes
