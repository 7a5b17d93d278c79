"""TLS handshakes: a client holds a place from the moment it is accepted, whether or not it ever says anything.

asyncio's server shows a connection to its protocol only when TLS stands. So the connections are accepted here.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from hub.api.connections import Cut
from hub.api.door.tls_input import TlsInput
from hub.api.protocols import Bounded, place_of
from omni_discovery.log_once import LogOnce
from omni_discovery.sockets.listen import BACKLOG

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from hub.api.protocols import BoundedHttp, BoundedServer

logger = logging.getLogger(__name__)

#: Connections that are accepted in one turn of the loop.
_MOST_AT_ONCE: Final = 64
#: The pause after this process, or the host, has run out of what a connection takes.
_PAUSE_S: Final = 1.0
_SCARCE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_LOG_EVERY_S: Final = 60.0
#: Handshakes and goodbyes are cut by the bounds of their BoundedServer, which looks once a second: this ends none
#: before that. asyncio would count the time that the rest of an answer takes as a part of the goodbye.
_NEVER_S: Final = 1e6


class Handshake(Bounded):
    """One connection until TLS stands."""

    def __init__(self, client: tuple[str, int]) -> None:
        self.client = client
        #: None before it has begun, and once it is over.
        self.task: asyncio.Task[None] | None = None
        #: What serves the client once TLS stands.
        self.protocol: BoundedHttp | None = None

    @property
    def unsent_bytes(self) -> int:
        """See Bounded. What TLS sends by itself fits into the kernel."""
        return 0

    @property
    def taken_bytes(self) -> int:
        """See Bounded."""
        return 0

    def cut(self, reason: Cut) -> None:
        """See Bounded. Nothing can be said before TLS stands."""
        logger.debug("tls.cut reason=%s", reason.value)
        self.drop()

    def drop(self) -> None:
        """See Bounded."""
        if self.task is not None:
            self.task.cancel()


def accept_waiting(listener: socket.socket) -> list[tuple[socket.socket, Any]]:
    """Accept all clients that the kernel has connected until now; return them with their addresses."""
    accepted = []
    with suppress(OSError):  # there are no more, or no room for them
        while True:
            accepted.append(listener.accept())
            accepted[-1][0].setblocking(False)
    return accepted


class TlsListener:
    """Accepts the clients of a listening socket, and has the protocols of ``make`` serve those with which TLS stands.

    It is closed as an asyncio.Server; the socket is its caller's.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        bounded: BoundedServer,
        make: Callable[[], BoundedHttp],
    ) -> None:
        self._listener, self._context, self._bounded, self._make = listener, context, bounded, make
        self._loop = asyncio.get_running_loop()
        self._under_way: set[Handshake] = set()
        self._is_closed = False
        self._log_once = LogOnce(time.monotonic)
        # One that shares its port does not listen before it is served.
        listener.listen(BACKLOG)
        self._listen()

    def close(self) -> None:
        """Accept nothing new, and end the handshakes. Idempotent."""
        self._accept_no_more()
        for each in self._under_way:
            each.drop()

    def _accept_no_more(self) -> None:
        if not self._is_closed:
            self._loop.remove_reader(self._listener)
        self._is_closed = True

    async def wait_closed(self) -> None:
        """Wait until all handshakes have ended."""
        await asyncio.gather(*(each.task for each in self._under_way if each.task), return_exceptions=True)

    def accept_last(self) -> None:
        """Accept all clients that the kernel has connected, and nobody after them; handshakes go on."""
        for sock, address in accept_waiting(self._listener):
            self._begin(sock, Handshake(address[:2]))
        self._accept_no_more()

    def _listen(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_MOST_AT_ONCE):
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _SCARCE:
                    self._pause(error)
                    return
                # The client has left again, or its network has failed.
                continue
            self._begin(sock, Handshake(address[:2]))

    def _pause(self, error: OSError) -> None:
        if self._log_once.should(error.errno, _LOG_EVERY_S):
            logger.warning("http.accept_failed reason=%s: clients wait, and are accepted when there is room", error)
        self._loop.remove_reader(self._listener)
        self._loop.call_later(_PAUSE_S, self._listen)

    def _begin(self, sock: socket.socket, handshake: Handshake) -> None:
        def flood() -> None:
            # A WebSocket may have taken the protocol's place.
            current = handshake if handshake.protocol is None else handshake.protocol.current
            self._bounded.cut({current: Cut.TLS_RECORDS})

        tls = TlsInput(self._loop, flood, self._bounded.share, place_of(handshake.client))

        def make() -> BoundedHttp:
            protocol = handshake.protocol = self._make()
            protocol.handshake, protocol.tls = handshake, tls
            return protocol

        sock.setblocking(False)
        begun = tls.start_tls(sock, make, self._context, handshake_s=_NEVER_S, shutdown_s=_NEVER_S)
        handshake.task = self._loop.create_task(begun)
        self._under_way.add(handshake)
        handshake.task.add_done_callback(partial(self._ended, sock, handshake, tls))
        connections = self._bounded.connections
        self._bounded.cut(connections.opened(handshake, time.monotonic(), is_handshake=True))

    def _ended(self, sock: socket.socket, handshake: Handshake, tls: TlsInput, task: asyncio.Task[None]) -> None:
        handshake.task = None
        self._under_way.discard(handshake)
        self._bounded.connections.closed(handshake)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            # It may never have got a transport that closes it.
            sock.close()
            # It leaves no ring of objects: each would hold 256 KiB of the loop's, and thousands come in a minute.
            _forget_frames(error)
            tls.forget()


def _forget_frames(error: BaseException | None) -> None:
    """Let go of what the frames hold that an error has come through, and those before it."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__
