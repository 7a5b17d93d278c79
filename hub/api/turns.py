"""Turns: what one client has sent reaches its parser in slices, and all others get a turn of the loop between them.

A parser takes the longer the more there is to find: 256 KiB of chunks of one byte are some 40 000 events. Other clients
must not wait for that. Most of what comes is one slice, which waits for nothing.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

_SLICE_BYTES: Final = 8 << 10
#: How long one turn may take, but for the slice with which it passes that.
_TURN_S: Final = 0.003


def _pass_nothing(_data: bytes) -> None:
    pass


def _never() -> bool:
    return False


class Turns:
    """The input of one connection. ``take`` gets it slice by slice; ``may_read``: whether the parser wants more."""

    def __init__(
        self,
        take: Callable[[bytes], None],
        may_read: Callable[[], bool],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._take, self._may_read, self._now_s = take, may_read, now_s
        self._rest = b""
        self._is_ended = False

    def came(self, data: bytes, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        """Pass on what has come, or a part of it; the rest follows in later turns, and nothing is read until then."""
        if self._rest:
            # The parser had reading resumed.
            self._rest += data
            transport.pause_reading()
        elif len(data) <= _SLICE_BYTES:
            self._take(data)
        else:
            self._rest = data
            self._turn(transport, loop)
            if self._rest:
                transport.pause_reading()

    def end(self) -> None:
        """Pass nothing on any more. Idempotent."""
        self._rest, self._is_ended = b"", True

    def close(self) -> None:
        """Pass nothing on any more, and let go of the connection. Idempotent."""
        self.end()
        self._take, self._may_read = _pass_nothing, _never

    def _turn(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        ends_s, start, rest = self._now_s() + _TURN_S, 0, self._rest
        while start < len(rest) and not self._is_ended and not transport.is_closing():
            self._take(rest[start : start + _SLICE_BYTES])
            start += _SLICE_BYTES
            if self._now_s() >= ends_s:
                break
        self._rest = b"" if self._is_ended or transport.is_closing() else rest[start:]
        if self._rest:
            loop.call_soon(self._later, transport, loop)

    def _later(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._turn(transport, loop)
        if not self._rest and not transport.is_closing() and (self._is_ended or self._may_read()):
            transport.resume_reading()
