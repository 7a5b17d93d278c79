"""TlsInput: what a client sends reaches TLS in slices, and others have their turn between them.

asyncio's TLS reads all that is there before anybody else has a turn, and shows its protocol nothing of what TLS is told
for itself. So this stands between the transport and TLS: it passes on a few KiB at a time, lets others in when these
have taken long, and counts the records.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final, cast

from hub.api.door.record_limit import RecordLimit

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable

    from hub.api.turns import LoopShare

#: What TLS gets at once: some 150 records at most.
_SLICE_BYTES: Final = 4 << 10
#: How long the slices of one turn may take, but for the one with which they pass that.
_TURN_S: Final = 0.003


def _nothing() -> None:
    """A flood that concerns nobody any more."""


class TlsInput(asyncio.BufferedProtocol):
    """One connection, below TLS. ``on_flood`` is called when its records bring too little; it has to close it."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_flood: Callable[[], None], share: LoopShare, client: str
    ) -> None:
        self._loop, self._on_flood, self._share, self._client = loop, on_flood, share, client
        self._limit = RecordLimit()
        self._slice = bytearray(_SLICE_BYTES)
        #: What came before TLS was there to take it, or waits for its turn.
        self._early = b""
        self._http_bytes = 0
        #: What the slices have taken since others had their turn.
        self._spent_s = 0.0
        self._transport: asyncio.Transport | None = None
        #: asyncio's protocol of TLS.
        self._tls: Any = None

    @property
    def unsent_bytes(self) -> int:
        """Encrypted bytes that the client has not taken. What is not encrypted yet lies in TLS's own transport."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def http_came(self, size_bytes: int) -> None:
        """So many bytes have come out of TLS."""
        self._http_bytes += size_bytes

    async def start_tls(
        self,
        sock: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        *,
        handshake_s: float,
        shutdown_s: float,
    ) -> None:
        """Shake hands with the client of an accepted socket; then TLS's transport is that of the protocol that is made.

        Raise OSError, also where the client fails. It may be cancelled.
        """
        # Until a client says something, it takes a descriptor and little else.
        await self._readable(sock)
        await self._share.turn(self._client)
        transport, _ = await self._loop.connect_accepted_socket(lambda: self, sock)
        if transport.is_closing():
            raise ConnectionResetError("the client has left")
        # It runs when TLS has become the transport's protocol, and before TLS is told of the transport.
        self._loop.call_soon(self._stand_before_tls, transport)
        try:
            # The protocol hears of nothing before its connection is made.
            made: Any = await self._loop.start_tls(
                transport,
                asyncio.Protocol(),
                context,
                server_side=True,
                ssl_handshake_timeout=handshake_s,
                ssl_shutdown_timeout=shutdown_s,
            )
        except BaseException:
            transport.abort()
            raise
        # What waits there while HTTP is not read is worked through at once when it is.
        made.set_read_buffer_limits(high=_SLICE_BYTES)
        protocol = make_protocol()
        made.set_protocol(protocol)
        protocol.connection_made(made)

    def forget(self) -> None:
        """The connection is over: hold nothing that holds this."""
        self._tls = self._transport = None
        self._on_flood = _nothing

    async def _readable(self, sock: socket.socket) -> None:
        came: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(sock, lambda: None if came.done() else came.set_result(None))
        try:
            await came
        finally:
            self._loop.remove_reader(sock)

    def _stand_before_tls(self, transport: asyncio.Transport) -> None:
        if transport.is_closing():
            return
        self._tls = transport.get_protocol()
        transport.set_protocol(self)
        if self._early:
            self._share.wait(self._client, self._pass_early)

    # ---- what the transport does; see asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> bytearray:
        """See asyncio."""
        return self._slice

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio."""
        data = bytes(self._slice[:nbytes])
        if self._tls is None or self._early:
            self._early += data
            self._pause()
        elif self._share.has_room:
            self._share.do_now(self._pass, data)
        else:
            self._early = data
            self._pause()
            self._share.wait(self._client, self._pass_early)

    def eof_received(self) -> bool | None:
        """See asyncio."""
        return None if self._tls is None else self._tls.eof_received()

    def pause_writing(self) -> None:
        """See asyncio."""
        self._tls.pause_writing()

    def resume_writing(self) -> None:
        """See asyncio."""
        self._tls.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        if self._tls is not None:
            self._tls.connection_lost(exc)
        self.forget()

    # ---- slices

    def _pass_early(self) -> None:
        data, self._early = self._early, b""
        if self._transport is not None and not self._transport.is_closing():
            self._pass(data)
            self._resume()

    def _pass(self, data: bytes) -> None:
        """Give TLS a slice; nothing more is read in this turn if that took long."""
        began_s = time.monotonic()
        self._tls.get_buffer(len(data))[: len(data)] = data
        self._tls.buffer_updated(len(data))
        http_bytes, self._http_bytes = self._http_bytes, 0
        self._spent_s += time.monotonic() - began_s
        if self._limit.came(data, http_bytes):
            self._on_flood()
        elif self._spent_s > _TURN_S:
            self._spent_s = 0.0
            self._pause()

    def _pause(self) -> None:
        transport = self._transport
        # TLS may have paused it, and has it resumed then.
        if transport is not None and transport.is_reading() and not transport.is_closing():
            transport.pause_reading()
            self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing() and not self._early:
            self._transport.resume_reading()
