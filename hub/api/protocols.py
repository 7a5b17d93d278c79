"""uvicorn's protocols with the bounds of ``Connections``: HTTP by h11, WebSockets by websockets.

uvicorn bounds neither the time of a header or a body, nor how long a client may leave its answer unread, nor the number
of connections: ``limit_concurrency`` refuses newcomers while strangers that send nothing keep their places. It also
parses all that has come at once, however many small pieces that is.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections import deque
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import h11
import msgspec
from h11._receivebuffer import ReceiveBuffer  # noqa: PLC2701 - the one place where headers of both kinds come through
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode

from hub.api.connections import ConnectionLimits, Connections, Cut
from hub.api.errors import error_body
from hub.api.exchange import client_name
from hub.api.turns import LoopShare, Turns
from omni_discovery.log_once import LogOnce

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
    from websockets.frames import Frame
    from websockets.http11 import Request

    from hub.api.door.tls_input import TlsInput

logger = logging.getLogger(__name__)

_SLOW_HEADER: Final = "the header of the request did not come in time: send all of it at once"
_SLOW_BODY: Final = "the body of the request did not come in time: send it without a pause, or send less"
_FULL: Final = "this hub has too many connections: try again, and use one connection for several requests"
_BODIES: Final = "too many unfinished bodies are held here: try again, and send the body at once"
_MALFORMED: Final = "this is no valid HTTP request"
_NO_HANDSHAKE: Final = "This is no request for a WebSocket: send a GET without a body.\n"
_TINY: Final = "the body of the request came in too many small chunks: send larger ones, or a Content-Length"
_LINES: Final = "the header of the request has too many lines: send at most 256"
#: The answer to a client whose connection is closed before it has its answer: status, type, code, text.
_ANSWERS: Final[Mapping[Cut, tuple[int, str, str, str]]] = {
    Cut.HEADER_TIMEOUT: (408, "timeout_error", "input_timeout", _SLOW_HEADER),
    Cut.BODY_TIMEOUT: (408, "timeout_error", "input_timeout", _SLOW_BODY),
    Cut.DISPLACED: (503, "service_unavailable_error", "too_many_connections", _FULL),
    Cut.REFUSED: (503, "service_unavailable_error", "too_many_connections", _FULL),
    Cut.BODY_MEMORY: (503, "service_unavailable_error", "too_many_bodies", _BODIES),
    Cut.MALFORMED: (400, "invalid_request_error", "invalid_request", _MALFORMED),
    Cut.MANY_LINES: (431, "invalid_request_error", "invalid_request", _LINES),
    Cut.TINY_PIECES: (400, "invalid_request_error", "invalid_request", _TINY),
}
#: What a WebSocket is closed with: the code, and the reason that its client reads.
_CLOSES: Final[Mapping[Cut, tuple[CloseCode, str]]] = {
    Cut.BODY_TIMEOUT: (CloseCode.POLICY_VIOLATION, "the message did not come in time"),
    Cut.TINY_PIECES: (CloseCode.POLICY_VIOLATION, "too many small frames"),
    Cut.TOO_FAST: (CloseCode.POLICY_VIOLATION, "too many messages: send at most 1000 a second"),
    Cut.DISPLACED: (CloseCode.TRY_AGAIN_LATER, "this hub has too many connections"),
    Cut.BODY_MEMORY: (CloseCode.TRY_AGAIN_LATER, "too many unfinished messages are held here"),
}
#: The key in the ASGI scope of what ``input_wait_of`` returns.
_INPUT_WAIT: Final = "omni.input_wait"
#: The keys in ASGI's state of what ``cut_answer`` and ``piece_writer_of`` call.
_CUT_ANSWER: Final = "omni.cut_answer"
_PIECE_WRITER: Final = "omni.piece_writer"
#: How often the log says that connections are closed for one reason.
_LOG_EVERY_S: Final = 60.0
_RETRY_AFTER: Final = b"5"
#: Lines of one header: h11 takes 5 us or more for each, also for one of four bytes, and all others wait meanwhile.
_MAX_LINES: Final = 256
#: A body may have so many chunks, and more if their mean size is at least this.
_FREE_CHUNKS: Final = 1024
_LEAST_CHUNK_BYTES: Final = 64
#: Frames that one message of a WebSocket may have.
_MAX_FRAGMENTS: Final = 1024
#: PINGs and PONGs that a client may send within a second.
_CONTROLS_PER_S: Final = 100
#: Whole messages that a client may send within a second.
_MESSAGES_PER_S: Final = 1000
#: Where Linux tells, in its ``struct tcp_info``, how many bytes the other host has acknowledged.
_ACKNOWLEDGED: Final = struct.Struct("=Q")
_ACKNOWLEDGED_AT: Final = 120
_TCP_STATE: Final = _ACKNOWLEDGED_AT + _ACKNOWLEDGED.size
#: How long a client may take for its side of a close: then the connection is reset.
_GOODBYE_S: Final = 1.0
#: How long a client may go on with its body after its answer.
_AFTER_ANSWER_S: Final = 2.0


class Bounded(ABC):
    """A connection of a BoundedServer."""

    client: tuple[str, int] | None

    @property
    @abstractmethod
    def unsent_bytes(self) -> int:
        """Bytes that the client has not taken."""

    @property
    @abstractmethod
    def taken_bytes(self) -> int:
        """Bytes that the client's host has acknowledged since it connected; 0 where that is not known."""

    @abstractmethod
    def cut(self, reason: Cut) -> None:
        """Close the connection; a client that may still read is told why."""

    @abstractmethod
    def drop(self) -> None:
        """Reset the connection."""


def place_of(client: tuple[str, int] | None) -> str:
    """Who shares a turn with a connection: its address, or network; empty where it has none."""
    return client_name("", client[0]) if client else ""


def input_wait_of(scope: Mapping[str, Any]) -> Callable[[bool], None] | None:
    """What the endpoint of a WebSocket calls with True when it waits for its client, and with False when it works.

    One that calls it never counts as working once the client has sent a whole message.
    """
    return scope.get(_INPUT_WAIT)


def cut_answer(scope: Mapping[str, Any]) -> None:
    """Close the connection of an HTTP request whose answer has begun and failed, so that it is not taken for whole.

    What was sent of it arrives if the client takes it at once. Without effect under other servers.
    """
    cut: Callable[[], None] | None = scope.get("state", {}).get(_CUT_ANSWER)
    if cut is not None:
        cut()


def piece_writer_of(scope: Mapping[str, Any]) -> Callable[[bytes], bool] | None:
    """What sends a piece of a streamed answer at once, behind all that ASGI's ``send`` was given; None: nothing does.

    It returns False, and sends nothing, before the answer has begun and while its client is behind or has gone.
    """
    make: Callable[[], Callable[[bytes], bool]] | None = scope.get("state", {}).get(_PIECE_WRITER)
    return None if make is None else make()


class BoundedServer:
    """The connections of one server. ``on_cut`` is called with the reason of each that the hub closes."""

    def __init__(self, limits: ConnectionLimits, on_cut: Callable[[str], None]) -> None:
        self.connections: Connections[Bounded] = Connections(limits)
        self.share = LoopShare()
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
        """Close the connections whose clients have kept the hub waiting too long, or have gone unnoticed."""
        for protocol in self.connections.all():
            if isinstance(protocol, _Input) and (protocol.is_left or protocol.has_said_goodbye()):
                protocol.drop()
        self.cut(self._overdue(time.monotonic()))

    def _overdue(self, now_s: float) -> dict[Bounded, Cut]:
        return self.connections.overdue(now_s, lambda each: each.unsent_bytes, lambda each: each.taken_bytes)

    def note_no_upgrade(self, connection: Bounded) -> None:
        """A client has asked for a protocol that is not spoken here."""
        if self._log_once.should("no_upgrade", _LOG_EVERY_S):
            host = connection.client[0] if connection.client else "-"
            logger.info("http.no_upgrade client=%s: it asked for another protocol than WebSocket", host)

    def drop_waiting(self) -> None:
        """Reset the connections that wait for their client: the hub stops."""
        for protocol in self.connections.waiting():
            protocol.drop()

    def drop_closing(self) -> None:
        """Reset the WebSockets that have been told that they end, and what only TLS keeps open: the hub stops."""
        for protocol in self.connections.all():
            is_told = isinstance(protocol, BoundedWebSocket) and protocol.close_sent
            if is_told or (isinstance(protocol, _Input) and protocol.has_said_goodbye()):
                protocol.drop()

    def cut(self, connections: Mapping[Bounded, Cut]) -> None:
        """Close connections, each with its reason."""
        for protocol, reason in connections.items():
            self._on_cut(reason.value)
            if self._log_once.should(reason, _LOG_EVERY_S):
                host = protocol.client[0] if protocol.client else "-"
                text = "http.cut reason=%s client=%s connections=%d: omni_hub_http_cut_total counts them"
                logger.warning(text, reason.value, host, len(self.connections))
            self.connections.answered(protocol)
            protocol.cut(reason)


class _ManyLinesError(h11.RemoteProtocolError):
    """A header with too many lines."""


class _FewLines(ReceiveBuffer):
    """What has come and was not parsed. Headers come out of it, of requests and behind bodies, if they are short."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """See h11. Raise RemoteProtocolError for too many, before they are parsed."""
        lines = super().maybe_extract_lines()
        if lines is not None and len(lines) > _MAX_LINES:
            raise _ManyLinesError(_LINES, error_status_hint=431)
        return lines


class _Framing(h11.Connection):
    """h11, but what it can't take is noted in ``fault``; tiny chunks of a body and many lines of a header are such."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER)
        self._receive_buffer = _FewLines()
        self.fault: Cut | None = None
        self._chunks = self._body_bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """See h11; after a fault it waits for ever."""
        if self.fault is not None:
            return h11.NEED_DATA
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            self.fault = Cut.MANY_LINES if isinstance(error, _ManyLinesError) else Cut.MALFORMED
            return h11.NEED_DATA
        if isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._body_bytes += len(event.data)
            if self._chunks > _FREE_CHUNKS and self._body_bytes < self._chunks * _LEAST_CHUNK_BYTES:
                self.fault = Cut.TINY_PIECES
                return h11.NEED_DATA
        elif isinstance(event, h11.EndOfMessage):
            self._chunks = self._body_bytes = 0
        return event


class _Input(Bounded, asyncio.Protocol):
    """What both protocols do in front of uvicorn's."""

    _server: BoundedServer
    _turns: Turns
    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    #: What stands below TLS; None: there is no TLS.
    tls: TlsInput | None = None
    #: Whether the last call of ``has_said_goodbye`` found it closed, and all sent.
    _is_ending = False

    @property
    def is_left(self) -> bool:
        """Whether the client has gone and nobody would notice."""
        return False

    def has_said_goodbye(self) -> bool:
        """Whether, now and at the last call, it is closed and all is sent: TLS waits for its client's side of that."""
        was_ending, self._is_ending = self._is_ending, self.transport.is_closing() and not self.unsent_bytes
        return was_ending and self._is_ending

    @property
    def unsent_bytes(self) -> int:
        """See Bounded."""
        encrypted_bytes = 0 if self.tls is None else self.tls.unsent_bytes
        return self.transport.get_write_buffer_size() + encrypted_bytes

    @property
    def taken_bytes(self) -> int:
        """See Bounded. A socket of another family than TCP does not tell."""
        sock = self.transport.get_extra_info("socket")
        try:
            state = b"" if sock is None else sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_STATE)
        except OSError:
            return 0
        return _ACKNOWLEDGED.unpack_from(state, _ACKNOWLEDGED_AT)[0] if len(state) == _TCP_STATE else 0

    def drop(self) -> None:
        """See Bounded."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._server.connections.closed(self)
        self._turns.close()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if self.tls is not None:
            self.tls.http_came(len(data))
        if not self.transport.is_closing():
            self._turns.came(data, self.transport)


class BoundedHttp(_Input, H11Protocol):
    """One HTTP connection."""

    def __init__(self, server: BoundedServer, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Each scope has a copy.
        self.app_state = {**self.app_state, _CUT_ANSWER: self._cut_short, _PIECE_WRITER: self._piece_writer}
        self._server = server
        self._framing = _Framing()
        self.conn = self._framing
        self._turns = Turns(self._take, lambda: not self.flow.read_paused, server.share, lambda: place_of(self.client))
        #: The TLS handshake that comes before; None: there is none.
        self.handshake: Bounded | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio."""
        super().connection_made(transport)
        self._server.cut(self._server.connections.opened(self, time.monotonic(), after=self.handshake))
        self.handshake = None

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        super().connection_lost(exc)
        # What leads back here goes, so that a connection is freed without the collector of rings.
        cycle: Any = self.cycle
        for state in (self.app_state, {} if cycle is None else cycle.scope["state"]):
            state.pop(_CUT_ANSWER, None)
            state.pop(_PIECE_WRITER, None)

    def _take(self, data: bytes) -> None:
        H11Protocol.data_received(self, data)
        self._follow(len(data))

    def handle_events(self) -> None:
        """Parse what has come, and close the connection for what can't be parsed."""
        super().handle_events()
        if self._framing.fault is not None and not self.transport.is_closing():
            self._server.cut({self: self._framing.fault})

    def _unsupported_upgrade_warning(self) -> None:
        # In place of uvicorn's, which is a line for each request.
        self._server.note_no_upgrade(self)

    @property
    def is_left(self) -> bool:
        """Whether the client has closed its side while its answer is made and, as it has sent more, nothing is read."""
        if not self.flow.read_paused or self.conn.their_state is not h11.DONE or self.transport.is_closing():
            return False
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        return bool(poll.poll(0))

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._follow(0)
        if self.conn.their_state is h11.SEND_BODY:
            self.loop.call_later(_AFTER_ANSWER_S, self._end_body, self.cycle)

    def _end_body(self, cycle: object) -> None:
        """Leave a client that has its answer, and still sends the body of that request."""
        if self.cycle is cycle and self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._server.cut({self: Cut.ANSWERED})

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand the connection over."""
        self._server.connections.closed(self)
        self._turns.end()
        super().handle_websocket_upgrade(event)
        adopted = self.current
        if isinstance(adopted, BoundedWebSocket):
            adopted.tls = self.tls

    @property
    def current(self) -> Bounded:
        """The protocol that the connection has now: this one, or its WebSocket."""
        protocol = self.transport.get_protocol()
        return protocol if isinstance(protocol, BoundedWebSocket) else self

    def _piece_writer(self) -> Callable[[bytes], bool]:
        return PieceWriter(self).write

    def _cut_short(self) -> None:
        if not self.transport.is_closing():
            self._server.cut({self: Cut.CUT_SHORT})

    def cut(self, reason: Cut) -> None:
        """See Bounded."""
        answer = _ANSWERS.get(reason)
        # None before the first request; uvicorn's annotation says otherwise.
        cycle: Any = self.cycle
        is_answered = cycle is not None and cycle.response_started and self.conn.our_state is not h11.IDLE
        has_begun = self.conn.their_state is not h11.IDLE or bool(self.conn.trailing_data[0])
        if reason is Cut.SEND_TIMEOUT or (answer is None and reason is not Cut.CUT_SHORT):
            self.transport.abort()
            return
        # A client that has sent nothing waits for no answer; but one that is refused has had no time to send.
        if answer is not None and (has_begun or reason is Cut.REFUSED) and not is_answered:
            self._answer(*answer)
        self.transport.close()
        self.loop.call_later(_GOODBYE_S, self.transport.abort)
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


class PieceWriter:
    """Sends pieces of the body of one answer, that of the request that its connection serves now."""

    def __init__(self, connection: BoundedHttp) -> None:
        self._connection = connection
        self._cycle = connection.cycle
        #: Whether each piece is a chunk with its length (HTTP/1.1); None: not known yet.
        self._is_chunked: bool | None = None

    def write(self, data: bytes) -> bool:
        """See ``piece_writer_of``."""
        cycle, connection = self._cycle, self._connection
        if (
            not cycle.response_started
            or cycle.response_complete
            or cycle.disconnected
            or connection.cycle is not cycle
            or connection.flow.write_paused
            or connection.transport.is_closing()
        ):
            return False
        if self._is_chunked is None:
            # Of the first, h11 shows how it frames the body; it keeps no count of one without a length.
            framed = connection.conn.send(h11.Data(data=data)) or b""
            self._is_chunked = framed != data
        elif self._is_chunked:
            framed = b"%x\r\n%b\r\n" % (len(data), data)
        else:
            framed = data
        connection.transport.write(framed)
        return True


class BoundedWebSocket(_Input, WebSocketsSansIOProtocol):
    """One WebSocket."""

    def __init__(self, server: BoundedServer, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._server = server
        self._turns = Turns(self._take, lambda: not self.read_paused, server.share, lambda: place_of(self.client))
        self.close_timeout = _AFTER_ANSWER_S
        #: Whether it waits for its client, apart from a message that has come in part. Whole messages end the wait, and
        #: the endpoint may begin it again.
        self._is_idle = True
        #: The second of the loop's clock in which so many control frames and whole messages have come.
        self._second = self._controls = self._messages = 0
        #: Memory of each whole message that the endpoint has not taken.
        self._held: deque[int] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        super().connection_made(transport)
        now_s = time.monotonic()
        self._server.connections.adopted(self, now_s)
        self._server.connections.header_awaited(self, now_s)

    def _take(self, data: bytes) -> None:
        WebSocketsSansIOProtocol.data_received(self, data)
        if self.transport.is_closing():
            return
        if self.conn.handshake_exc is None:
            self._follow(len(data))
        else:
            self._server.cut({self: Cut.MALFORMED})

    def _follow(self, size_bytes: int) -> None:
        """Note what is waited for, after so many bytes have come."""
        connections, now_s = self._server.connections, time.monotonic()
        if self._has_part:
            # Of what has come at once, whole messages may have been the most.
            part_bytes = len(self.conn.reader.buffer) + sum(map(len, self.frames))
            self._server.cut(connections.body_came(self, min(size_bytes, part_bytes), now_s))
        elif not self.handshake_initiated:
            connections.header_awaited(self, now_s)
        elif self._is_idle:
            connections.header_awaited(self, now_s, is_idle=True)
        else:
            connections.answered(self)

    @property
    def _has_part(self) -> bool:
        """Whether a message, or the request for the WebSocket, has come in part."""
        return bool(self.frames or self.conn.reader.buffer)

    def handle_connect(self, event: Request) -> None:
        """Begin the WebSocket's task, whose endpoint may say when it waits for the client."""
        self._server.connections.answered(self)
        super().handle_connect(event)
        if hasattr(self, "scope"):
            self.scope[_INPUT_WAIT] = self._note_wait  # type: ignore[typeddict-unknown-key]

    def _note_wait(self, waits: bool) -> None:
        self._is_idle = waits
        if not self.transport.is_closing() and not self._has_part:
            self._follow(0)

    async def send(self, message: ASGISendEvent) -> None:
        """See ASGI. A request for a WebSocket that was refused is answered: uvicorn would log it as a fault of ours.

        Where the connection was closed meanwhile, the application is told so: it may not have heard of it yet.
        """
        await self.writable.wait()
        if self.close_sent and self.initial_response is None:
            raise ClientDisconnected
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            self.handshake_complete = True

    def handle_cont(self, event: Frame) -> None:
        """Take a piece of a message, unless it has too many."""
        if len(self.frames) < _MAX_FRAGMENTS:
            super().handle_cont(event)
        elif not self.transport.is_closing():
            self._server.cut({self: Cut.TINY_PIECES})

    def _may_control(self) -> bool:
        """Whether one more control frame may come now; else the connection is closed."""
        self._begin_second()
        self._controls += 1
        if self._controls > _CONTROLS_PER_S and not self.transport.is_closing():
            self._server.cut({self: Cut.TINY_PIECES})
        return not self.transport.is_closing()

    def _may_speak(self) -> bool:
        """Whether one more whole message may come now; else the connection is closed."""
        self._begin_second()
        self._messages += 1
        if self._messages > _MESSAGES_PER_S and not self.transport.is_closing():
            self._server.cut({self: Cut.TOO_FAST})
        return not self.transport.is_closing()

    def _begin_second(self) -> None:
        second = int(self.loop.time())
        if second != self._second:
            self._second, self._controls, self._messages = second, 0, 0

    def handle_pong(self, event: Frame) -> None:
        """Take a pong, unless there are too many."""
        if self._may_control():
            super().handle_pong(event)

    def send_receive_event_to_app(self) -> None:
        """Pass a whole message on, unless there are too many.

        One that is no UTF-8 ends the connection, and leaves no traceback in the log.
        """
        if not self._may_speak():
            self.frames = []
            return
        self._is_idle = False
        self._server.connections.answered(self)
        held_bytes = sum(map(len, self.frames))
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                text = b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self.frames = []
                self.conn.send_close(CloseCode.INVALID_DATA)
                self.handle_parser_exception()
                return
            held_bytes = len(text) if text.isascii() else 4 * len(text)
        is_heard = not self.close_sent
        super().send_receive_event_to_app()
        if is_heard:
            self._held.append(held_bytes)
            self._server.cut(self._server.connections.message_came(self, held_bytes))

    async def receive(self) -> ASGIReceiveEvent:
        """See ASGI."""
        message = await super().receive()
        if message["type"] == "websocket.receive" and self._held:
            self._server.connections.message_taken(self, self._held.popleft())
        return message

    def handle_ping(self) -> None:
        """Answer a ping, but not that of a client which takes no answers: they would pile up here.

        RFC 6455, 5.5.3, lets an endpoint answer only the latest of several pings.
        """
        if not self._may_control():
            return
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()

    def cut(self, reason: Cut) -> None:
        """See Bounded."""
        logger.debug("stream.cut reason=%s", reason.value)
        if self.conn.handshake_exc is not None:
            # The library has made an answer for some of them.
            answer = b"".join(self.conn.data_to_send())
            self.transport.write(answer or self.conn.reject(HTTPStatus.BAD_REQUEST, _NO_HANDSHAKE).serialize())
            self.transport.close()
            self.loop.call_later(_GOODBYE_S, self.transport.abort)
            return
        if reason not in _CLOSES or self.close_sent or not self.handshake_complete:
            self.transport.abort()
            return
        self.stop_keepalive()
        self.frames = []
        self.conn.fail(*_CLOSES[reason])
        self.handle_parser_exception()
        self.loop.call_later(_GOODBYE_S, self.transport.abort)
