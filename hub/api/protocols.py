"""uvicorn's protocols with the bounds of ``Connections``: HTTP by h11, WebSockets by websockets.

uvicorn bounds neither the time of a header or a body, nor how long a client may leave its answer unread, nor the number
of connections: ``limit_concurrency`` refuses newcomers while strangers that send nothing keep their places.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode

from hub.api.connections import ConnectionLimits, Connections, Cut
from hub.api.errors import error_body
from omni_discovery.log_once import LogOnce

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

BoundedProtocol: TypeAlias = "BoundedHttp | BoundedWebSocket"

_SLOW_HEADER: Final = "the header of the request did not come in time: send all of it at once"
_SLOW_BODY: Final = "the body of the request did not come in time: send it without a pause, or send less"
_FULL: Final = "this hub has too many connections: try again, and use one connection for several requests"
_BODIES: Final = "too many unfinished bodies are held here: try again, and send the body at once"
#: The answer to a client whose connection is closed before it has its answer: status, type, code, text.
_ANSWERS: Final[Mapping[Cut, tuple[int, str, str, str]]] = {
    Cut.HEADER_TIMEOUT: (408, "timeout_error", "input_timeout", _SLOW_HEADER),
    Cut.BODY_TIMEOUT: (408, "timeout_error", "input_timeout", _SLOW_BODY),
    Cut.DISPLACED: (503, "service_unavailable_error", "too_many_connections", _FULL),
    Cut.REFUSED: (503, "service_unavailable_error", "too_many_connections", _FULL),
    Cut.BODY_MEMORY: (503, "service_unavailable_error", "too_many_bodies", _BODIES),
}
#: How often the log says that connections are closed for one reason.
_LOG_EVERY_S: Final = 60.0
_RETRY_AFTER: Final = b"5"


class BoundedServer:
    """The connections of one server. ``on_cut`` is called with the reason of each that the hub closes."""

    def __init__(self, limits: ConnectionLimits, on_cut: Callable[[str], None]) -> None:
        self.connections: Connections[BoundedProtocol] = Connections(limits)
        self._on_cut = on_cut
        self._log_once = LogOnce(time.monotonic)

    @property
    def protocols(self) -> dict[str, Any]:
        """The settings of uvicorn that have it use these protocols. ``review`` is called once a second."""
        return {
            "http": partial(BoundedHttp, self),
            "ws": partial(BoundedWebSocket, self),
            "callback_notify": self.review,
            "timeout_notify": 1,
        }

    async def review(self) -> None:
        """Close the connections whose clients have kept the hub waiting too long."""
        self.cut(self.connections.overdue(time.monotonic(), lambda each: each.unsent_bytes))

    def cut(self, connections: Mapping[BoundedProtocol, Cut]) -> None:
        """Close connections, each with its reason."""
        for protocol, reason in connections.items():
            self._on_cut(reason.value)
            if self._log_once.should(reason, _LOG_EVERY_S):
                host = protocol.client[0] if protocol.client else "-"
                text = "http.cut reason=%s client=%s connections=%d: omni_hub_http_cut_total counts them"
                logger.warning(text, reason.value, host, len(self.connections))
            protocol.cut(reason)


class BoundedHttp(H11Protocol):
    """One HTTP connection."""

    def __init__(self, server: BoundedServer, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._server = server

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the client has not taken."""
        return self.transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio."""
        super().connection_made(transport)
        self._server.cut(self._server.connections.opened(self, time.monotonic()))

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._server.connections.closed(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if not self.transport.is_closing():
            super().data_received(data)
            self._follow(len(data))

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._follow(0)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand the connection over."""
        self._server.connections.closed(self)
        super().handle_websocket_upgrade(event)

    def cut(self, reason: Cut) -> None:
        """Close the connection; a client that may still read is told why."""
        answer = _ANSWERS.get(reason)
        # None before the first request; uvicorn's annotation says otherwise.
        cycle: Any = self.cycle
        is_answered = cycle is not None and cycle.response_started and self.conn.our_state is not h11.IDLE
        has_begun = self.conn.their_state is not h11.IDLE or bool(self.conn.trailing_data[0])
        if reason is Cut.SEND_TIMEOUT or answer is None:
            self.transport.abort()
            return
        # A client that has sent nothing waits for no answer; but one that is refused has had no time to send.
        if (has_begun or reason is Cut.REFUSED) and not is_answered:
            self._answer(*answer)
        self.transport.close()
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()

    def _answer(self, status: int, kind: str, code: str, text: str) -> None:
        body = msgspec.json.encode(error_body(text, kind, code))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            *([(b"retry-after", _RETRY_AFTER)] if status == 503 else []),
        ]
        events = (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage())
        try:
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        except h11.LocalProtocolError:
            # Something was answered already.
            logger.debug("http.cut_unanswered code=%s", code)

    def _follow(self, size_bytes: int) -> None:
        """Note what is waited for, after so many bytes have come."""
        connections, now_s = self._server.connections, time.monotonic()
        if self.transport.is_closing() or self.transport.get_protocol() is not self:
            return
        match self.conn.their_state:
            case h11.IDLE:
                is_idle = not size_bytes and not self.conn.trailing_data[0]
                connections.header_awaited(self, now_s, is_idle=is_idle)
            case h11.SEND_BODY:
                self._server.cut(connections.body_came(self, size_bytes, now_s))
            case _:
                connections.answered(self)


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """One WebSocket."""

    def __init__(self, server: BoundedServer, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._server = server

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the client has not taken."""
        return self.transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        super().connection_made(transport)
        self._server.connections.adopted(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._server.connections.closed(self)
        super().connection_lost(exc)

    def send_receive_event_to_app(self) -> None:
        """Pass a whole message on. One that is no UTF-8 ends the connection, and leaves no traceback in the log."""
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self.frames = []
                self.conn.send_close(CloseCode.INVALID_DATA)
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    def handle_ping(self) -> None:
        """Answer a ping, but not that of a client which takes no answers: they would pile up here.

        RFC 6455, 5.5.3, lets an endpoint answer only the latest of several pings.
        """
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()

    def cut(self, reason: Cut) -> None:
        """Close the connection of a client that reads nothing."""
        logger.debug("stream.cut reason=%s", reason.value)
        self.transport.abort()
