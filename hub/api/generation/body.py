"""Bodies: of a request, read within bounds and decoded from JSON; of an answer, bounded and encoded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from hub.api.errors import BodyTooLongError
from omni_discovery.errors import EngineFailedError, InvalidRequestError
from omni_discovery.inputs.containers import check_text

if TYPE_CHECKING:
    from starlette.requests import Request

_Body = TypeVar("_Body")

#: Longest request body that is accepted, and longest that is read to its end so that its sender gets an error. A
#: message to a replica has to hold the body (MAX_HEAD_BYTES), and with a resume the answer so far.
MAX_BODY_BYTES: Final = 3 << 20
MAX_DROPPED_BYTES: Final = 64 << 20
#: Bytes of a whole answer, as they are sent.
MOST_ANSWER_BYTES: Final = 128 << 20
#: From so many bytes on an answer, or a piece of it, is encoded in a thread: the hub's loop must go on meanwhile.
_LONG_BYTES: Final = 1 << 20


class AnswerSize:
    """The size of what is kept of an answer that is sent as a whole. ``instead``: what to ask for in its place."""

    def __init__(self, instead: str) -> None:
        self._instead = instead
        self.size_bytes = 0

    def has_room(self, size_bytes: int) -> bool:
        """Whether so much more may be kept."""
        return self.size_bytes + size_bytes <= MOST_ANSWER_BYTES

    def add(self, size_bytes: int) -> None:
        """Count what is kept from now on. Raise EngineFailedError if that is too much."""
        has_room = self.has_room(size_bytes)
        self.size_bytes += size_bytes
        if not has_room:
            most_mib = MOST_ANSWER_BYTES >> 20
            raise EngineFailedError(f"the answer is longer than {most_mib} MiB: ask for it with {self._instead}")


async def encode_body(make: Callable[[], Any], size_bytes: int) -> bytes:
    """What ``make`` returns as JSON, of about ``size_bytes``. It is called in a thread if that is much."""
    if size_bytes < _LONG_BYTES:
        return msgspec.json.encode(make())
    return await asyncio.to_thread(lambda: msgspec.json.encode(make()))


async def encode_event(make: Callable[[], Any], size_bytes: int) -> bytes:
    """One server-sent event, in the same way."""
    return b"".join((b"data: ", await encode_body(make, size_bytes), b"\n\n"))


async def read_body(request: Request) -> bytes:
    """The whole body, of at most MAX_BODY_BYTES. Raise BodyTooLongError if it is longer."""
    limit = f"the body is longer than {MAX_BODY_BYTES} bytes"
    too_long = BodyTooLongError(f"{limit}: send less in one request, or smaller pictures")
    length, waits = request.headers.get("content-length", ""), "expect" in request.headers
    size_bytes = int(length[:20]) if length.isdecimal() else 0
    if size_bytes > MAX_DROPPED_BYTES or (waits and size_bytes > MAX_BODY_BYTES):
        raise too_long
    body, size_bytes = bytearray(), 0
    async for piece in request.stream():
        size_bytes += len(piece)
        if size_bytes <= MAX_BODY_BYTES:
            body += piece
        elif size_bytes > MAX_DROPPED_BYTES:
            break
    # It was read to its end all the same: a client that is still sending would get no answer from a closed connection.
    if size_bytes > MAX_BODY_BYTES:
        raise too_long
    return bytes(body)


def decode_body(decoder: msgspec.json.Decoder[_Body], body: bytes) -> _Body:
    """Decode and check a body. Raise InvalidRequestError that names the field."""
    check_text(body)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        # The decoder names the place already, in backquotes.
        raise InvalidRequestError(f"the body can't be used: {error}".replace("`", "'")) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from error
