"""What a hub and the process that is its Mooncake client tell each other over their socket."""

from __future__ import annotations

import socket
import time
from typing import Final

import msgspec

from hub.jobs.mooncake.names import MOST_OBJECT_BYTES

_LENGTH_BYTES: Final = 4
#: The longest message: an object, and what is beside it.
_MOST_BYTES: Final = MOST_OBJECT_BYTES + (64 << 10)


class StoreCall(msgspec.Struct, frozen=True, array_like=True):
    """What is to be done: ``connect`` to the master ``name`` from this host's address ``own``, or what its kind says.

    That is ``put`` or ``get`` the object ``name``, or ``remove`` all in whose names that pattern is found.
    """

    kind: str
    name: str
    own: str = ""
    content: bytes = b""


class StoreAnswer(msgspec.Struct, frozen=True, array_like=True):
    """What came of it.

    ``error`` says why the store could not do it; ``is_lost``: and will not before it is connected anew. ``count`` is
    that of the objects which are there now (put), were there (get), or are removed.
    """

    count: int = 0
    content: bytes = b""
    error: str = ""
    is_lost: bool = False


def send(end: socket.socket, message: StoreCall | StoreAnswer, deadline_s: float | None = None) -> None:
    """Send a message by that moment of the monotonic clock. Raise OSError, TimeoutError among them."""
    content = msgspec.msgpack.encode(message)
    end.settimeout(_left_s(deadline_s))
    end.sendall(len(content).to_bytes(_LENGTH_BYTES, "big") + content)


def receive(end: socket.socket, deadline_s: float | None = None) -> bytes:
    """The next message as it came, by that moment of the monotonic clock. Raise OSError, TimeoutError among them."""
    length = int.from_bytes(_take(end, _LENGTH_BYTES, deadline_s), "big")
    if length > _MOST_BYTES:
        raise ConnectionError(f"a message of {length} bytes")
    return bytes(_take(end, length, deadline_s))


def _take(end: socket.socket, size_bytes: int, deadline_s: float | None) -> bytearray:
    taken = bytearray(size_bytes)
    rest = memoryview(taken)
    while rest:
        end.settimeout(_left_s(deadline_s))
        count = end.recv_into(rest)
        if not count:
            raise ConnectionError("the other side has ended")
        rest = rest[count:]
    return taken


def _left_s(deadline_s: float | None) -> float | None:
    # Zero would mean that the call does not wait at all.
    return None if deadline_s is None else max(0.001, deadline_s - time.monotonic())
