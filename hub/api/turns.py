"""Turns: what clients have sent reaches their parsers in slices, and all others get a turn of the loop between them.

A parser takes the longer the more there is to find: 256 KiB of chunks of one byte are some 40 000 events. Other clients
must not wait for that, nor for thousands of connections whose last bytes come at one moment. Most of what comes is one
slice, which waits for nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_SLICE_BYTES: Final = 8 << 10
#: How long one turn may take, but for the slice with which it passes that.
_TURN_S: Final = 0.003
#: The same of all connections together, in one turn of the loop.
_ALL_S: Final = 0.005
#: What counts at least for something that has waited: it begins what takes time later.
_LEAST_S: Final = 0.0005


class LoopShare:
    """What the input of all connections may take of each turn of the loop. What is beyond waits, the clients in turn.

    ``client``: an address, or whatever tells them apart. Used on one loop.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._spent_s = 0.0
        #: By client, the one whose turn is next before all others.
        self._waiting: OrderedDict[str, deque[Callable[[], None]]] = OrderedDict()
        #: Whether the loop is to call ``_next``.
        self._is_due = False

    @property
    def has_room(self) -> bool:
        """Whether something may be done at once."""
        return not self._waiting and self._spent_s < _ALL_S

    def do_now(self, act: Callable[[bytes], None], data: bytes) -> None:
        """Call ``act`` with the data at once, and count what it takes."""
        began_s = self._now_s()
        try:
            act(data)
        finally:
            self._spent_s += self._now_s() - began_s
            self._call_next()

    def wait(self, client: str, act: Callable[[], None]) -> None:
        """Have ``act`` called in a later turn of the loop."""
        self._waiting.setdefault(client, deque()).append(act)
        self._call_next()

    async def turn(self, client: str) -> None:
        """Wait for such a turn."""
        came: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.wait(client, lambda: None if came.done() else came.set_result(None))
        await came

    def _call_next(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._is_due, self._spent_s = False, 0.0
        try:
            while self._waiting and self._spent_s < _ALL_S:
                client, waiting = next(iter(self._waiting.items()))
                act = waiting.popleft()
                self._waiting.move_to_end(client)
                if not waiting:
                    del self._waiting[client]
                began_s = self._now_s()
                try:
                    act()
                finally:
                    self._spent_s += max(self._now_s() - began_s, _LEAST_S)
        finally:
            if self._waiting or self._spent_s:
                self._call_next()


def _pass_nothing(_data: bytes) -> None:
    pass


def _never() -> bool:
    return False


class Turns:
    """The input of one connection. ``take`` gets it slice by slice; ``may_read``: whether the parser wants more.

    ``client`` says whose it is.
    """

    def __init__(
        self,
        take: Callable[[bytes], None],
        may_read: Callable[[], bool],
        share: LoopShare,
        client: Callable[[], str],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._take, self._may_read, self._share, self._client, self._now_s = take, may_read, share, client, now_s
        self._rest = b""
        self._is_ended = False

    def came(self, data: bytes, transport: asyncio.Transport) -> None:
        """Pass on what has come, or a part of it; the rest follows in later turns, and nothing is read until then."""
        if self._rest:
            # The parser had reading resumed.
            self._rest += data
            transport.pause_reading()
        elif not self._share.has_room:
            self._rest = data
            self._wait(transport)
            transport.pause_reading()
        elif len(data) <= _SLICE_BYTES:
            self._share.do_now(self._take, data)
        else:
            self._rest = data
            self._share.do_now(lambda _: self._turn(transport), data)
            if self._rest:
                transport.pause_reading()

    def end(self) -> None:
        """Pass nothing on any more. Idempotent."""
        self._rest, self._is_ended = b"", True

    def close(self) -> None:
        """Pass nothing on any more, and let go of the connection. Idempotent."""
        self.end()
        self._take, self._may_read, self._client = _pass_nothing, _never, str

    def _turn(self, transport: asyncio.Transport) -> None:
        ends_s, start, rest = self._now_s() + _TURN_S, 0, self._rest
        while start < len(rest) and not self._is_ended and not transport.is_closing():
            self._take(rest[start : start + _SLICE_BYTES])
            start += _SLICE_BYTES
            if self._now_s() >= ends_s:
                break
        self._rest = b"" if self._is_ended or transport.is_closing() else rest[start:]
        if self._rest:
            self._wait(transport)

    def _wait(self, transport: asyncio.Transport) -> None:
        self._share.wait(self._client(), lambda: self._later(transport))

    def _later(self, transport: asyncio.Transport) -> None:
        self._turn(transport)
        if not self._rest and not transport.is_closing() and (self._is_ended or self._may_read()):
            transport.resume_reading()
