"""WebSockets that wait for their client give their places as idle connections do; what they hold is bounded."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import Counter
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from hub.api.connections import ConnectionLimits, Connections
from hub.api.protocols import BoundedHttp, BoundedWebSocket
from hub.api.server import HttpConfig, HttpServer
from omni_discovery.sockets.listen import bind
from tests.support.attackers import PING, Attacker, attackers, frame
from tests.support.hub import Hub

PLACES = 6
#: What a transport takes before it says that the client is behind.
BUFFERED = 64 << 10
#: The headers of a request for a WebSocket, but for what comes behind them; for a host.
ASK_FOR_STREAM = (
    "Host: {}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {'A' * 22}==\r\n"
)
#: Each word takes its time, so that an answer can be made to last.
ECHO = "{model: m, stages: [{stage_id: 0, engine: echo, engine_args: {capacity: 64, delay_s: 1}, final_output: text}]}"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    flags = ("--max-connections", str(PLACES), "--stream-idle-timeout", "600")
    hub = Hub.of_yaml(tmp_path_factory.mktemp("hub"), ECHO, *flags)
    try:
        yield hub.wait_ready()
    finally:
        hub.stop()


def say(client: ClientConnection, prompt: str) -> None:
    client.send(json.dumps({"type": "segment", "prompt": prompt}))


def read_to_end_of_segment(client: ClientConnection) -> None:
    while json.loads(client.recv(30))["type"] != "segment_end":
        pass


@pytest.mark.attack("D6")
def test_between_two_segments_a_stream_gives_its_place_and_during_one_it_keeps_it(hub: Hub) -> None:
    """1. all places but one are taken: by streams between two segments, and by one whose segment is being answered
    2. more clients come than places are left: they are served in the places of streams that wait, the longest first
    3. those are told why; the one that is being answered goes on, and may send its next segment
    """
    address = hub.url.replace("http", "ws", 1) + "/v1/stream"
    with ExitStack() as stack:
        busy = stack.enter_context(connect(address))
        say(busy, "one")
        read_to_end_of_segment(busy)
        idle = [stack.enter_context(connect(address)) for _ in range(PLACES - 2)]
        for client in idle:
            say(client, "one")
        for client in idle:
            read_to_end_of_segment(client)
        # A ping is no work for the hub.
        idle[0].ping().wait(30)
        say(busy, "word " * 20)
        assert json.loads(busy.recv(30))["segment"] == 1
        for newcomer in stack.enter_context(attackers(hub.url, PLACES - 1)):
            newcomer.request(json.dumps(chat()).encode())
        for client in idle:
            with pytest.raises(ConnectionClosed):
                client.recv(30)
            assert (client.close_code, client.close_reason) == (1013, "this hub has too many connections")
        assert json.loads(busy.recv(30))["type"] == "delta"


def chat() -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "word " * 60}], "stream": True}


class Late:
    """An application whose WebSockets are accepted when ``opens`` is set."""

    def __init__(self) -> None:
        self.opens = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await self.opens.wait()
        await send({"type": "websocket.accept"})
        while (await receive())["type"] != "websocket.disconnect":
            pass


class Talker:
    """An application that sends to its WebSocket, and counts what comes, until each has its end."""

    def __init__(self) -> None:
        self.came = 0
        self.codes: list[int] = []
        self.failures: list[BaseException] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await asyncio.gather(self._hear(receive), self._talk(send))

    async def _hear(self, receive: Any) -> None:
        while (message := await receive())["type"] != "websocket.disconnect":
            self.came += 1
        self.codes.append(message["code"])

    async def _talk(self, send: Any) -> None:
        try:
            while True:
                await send({"type": "websocket.send", "text": "word"})
                await asyncio.sleep(0)
        except (OSError, RuntimeError) as error:
            self.failures.append(error)


@asynccontextmanager
async def late_server(limits: ConnectionLimits, send_buffer: int = 0) -> AsyncIterator[tuple[Late, str, HttpServer]]:
    app = Late()
    async with server_of(app, limits, send_buffer) as (url, server):
        try:
            yield app, url, server
        finally:
            app.opens.set()


@asynccontextmanager
async def server_of(
    app: Any, limits: ConnectionLimits, send_buffer: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[str, HttpServer]]:
    listeners = bind("127.0.0.1", 0)
    if send_buffer:
        # Connections inherit it.
        listeners[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    cuts = Counter("cuts", "", ["reason"], registry=None)
    omni: Any = SimpleNamespace(hub_metrics=SimpleNamespace(http_cuts=cuts), end_requests=lambda: None)
    server = HttpServer(omni, app, HttpConfig(limits), tls=tls)
    server.start(listeners)
    try:
        yield f"http://127.0.0.1:{listeners[0].getsockname()[1]}", server
    finally:
        await server.stop()


def begin(url: str) -> Attacker:
    """Ask for a WebSocket, and wait for no answer."""
    each = Attacker(url)
    ask_for_stream(each)
    return each


def ask_for_stream(each: Attacker) -> None:
    each.send(f"GET /v1/stream HTTP/1.1\r\n{ASK_FOR_STREAM.format(each.host)}\r\n".encode())


@pytest.mark.attack("D6")
async def test_what_comes_before_a_websocket_is_accepted_is_counted_too() -> None:
    """Half a message of 1 MB each, from three clients that nobody has accepted: the memory is bounded, and the time."""
    async with late_server(ConnectionLimits(body_timeout_s=3, max_unfinished_bytes=2_500_000)) as (_, url, server):
        held = server._bounded.connections
        clients = [begin(url) for _ in range(3)]
        try:
            await until(lambda: streams(held) == 3)
            for each in clients:
                each.send(b"\x81\xff" + (2_000_000).to_bytes(8, "big") + bytes(4) + b"x" * 1_000_000)
            await until(lambda: len(held) == 2 and held.unfinished_bytes > 1_500_000)
            assert held.unfinished_bytes <= 2_500_000
            await until(lambda: len(held) == 0)
            assert held.unfinished_bytes == 0
        finally:
            for each in clients:
                each.close()


async def test_a_message_before_the_accept_is_delivered_after_it() -> None:
    async with late_server(ConnectionLimits()) as (app, url, server):
        held = server._bounded.connections
        client = await asyncio.to_thread(begin, url)
        try:
            await until(lambda: streams(held) == 1)
            client.send(frame(1, b"early"))
            await until(lambda: not held.waiting())
            app.opens.set()
            client.send(frame(8, b""))
            answer = await asyncio.to_thread(client.answer)
            assert answer.startswith(b"HTTP/1.1 101 ")
        finally:
            client.close()


@pytest.mark.attack("A13")
async def test_pongs_that_nobody_reads_are_bounded_however_slowly_the_pings_come() -> None:
    """1. a client sends 90 pings in each of many seconds, too few to be cut for them, and reads nothing
    2. of their pongs no more wait in the hub than fits its buffer; 3. what lies unread for too long ends it
    """
    async with late_server(ConnectionLimits(send_timeout_s=3), send_buffer=16 << 10) as (app, url, server):
        held = server._bounded.connections
        app.opens.set()
        client = Attacker(url, receive_buffer=4096)
        try:
            ask_for_stream(client)
            await until(lambda: streams(held) == 1)
            (stream,) = held.all()
            assert isinstance(stream, BoundedWebSocket)
            most = sent = 0
            while sent < 4 * BUFFERED and not stream.transport.is_closing():
                # A second passes.
                stream._second = stream._controls = 0
                client.send(PING * 90)
                sent += 90 * len(PING)
                await until(lambda: stream._controls == 90 or stream.transport.is_closing())
                most = max(most, stream.unsent_bytes)
            assert BUFFERED // 2 < most < 2 * BUFFERED
            await until(lambda: len(held) == 0)
            assert server._omni.hub_metrics.http_cuts.labels("send_timeout")._value.get() == 1
        finally:
            client.close()


@pytest.mark.attack("G6")
async def test_what_asks_for_a_websocket_wrongly_is_answered_and_closed() -> None:
    """By a POST, with a body of either kind, with too many headers, with a header or a path that is too long."""
    async with late_server(ConnectionLimits()) as (_, url, server):
        for method, path, extra, status in (
            ("POST", "/v1/stream", "Content-Length: 5\r\n", 400),
            ("GET", "/v1/stream", "Content-Length: 5\r\n", 400),
            ("GET", "/v1/stream", "Transfer-Encoding: chunked\r\n", 400),
            ("GET", "/v1/stream", "".join(f"a{number}: b\r\n" for number in range(200)), 431),
            ("GET", "/v1/stream", f"a: {'b' * 9000}\r\n", 431),
            ("GET", f"/v1/stream?{'y' * 9000}", "", 414),
        ):
            client = Attacker(url)
            try:
                client.send(f"{method} {path} HTTP/1.1\r\n{ASK_FOR_STREAM.format(client.host)}{extra}\r\n".encode())
                answer = await asyncio.to_thread(client.answer)
                assert answer.startswith(f"HTTP/1.1 {status} ".encode()), (extra[:40], answer)
                assert b"WebSocket" in answer
                await until(lambda: len(server._bounded.connections) == 0)
            finally:
                client.close()
        assert server._omni.hub_metrics.http_cuts.labels("malformed")._value.get() == 6


@pytest.mark.attack("G6")
async def test_a_request_for_a_websocket_that_does_not_end_has_the_time_of_a_header() -> None:
    async with late_server(ConnectionLimits(header_timeout_s=3)) as (_, url, server):
        held = server._bounded.connections
        client = Attacker(url)
        try:
            await until(lambda: len(held) == 1)
            (http,) = held.all()
            assert isinstance(http, BoundedHttp)
            stream = BoundedWebSocket(
                server._bounded, config=http.config, server_state=server._server.server_state, app_state={}
            )
            held.closed(http)
            stream.connection_made(http.transport)
            http.transport.set_protocol(stream)
            client.send(b"GET /v1/stream HTTP/1.1\r\nHost: localhost\r\n")
            assert await asyncio.to_thread(client.answer) == b""
            assert server._omni.hub_metrics.http_cuts.labels("header_timeout")._value.get() == 1
        finally:
            client.close()


class Deaf:
    """An application that accepts, and takes a message each time that it is ``told``."""

    def __init__(self) -> None:
        self.told = asyncio.Semaphore(0)
        self.taken = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while await self.told.acquire() and (await receive())["type"] != "websocket.disconnect":
            self.taken += 1


@pytest.mark.attack("Z69")
async def test_a_message_that_waits_for_its_endpoint_is_counted_until_that_takes_it() -> None:
    """1. of each of two, a message waits: a text beyond ASCII counts fourfold; 2. one is taken
    3. a third client's is more than there is room for: it gives way
    """
    app = Deaf()
    async with server_of(app, ConnectionLimits(max_unfinished_bytes=60_000)) as (url, server):
        held = server._bounded.connections
        clients = [await asyncio.to_thread(open_and_read, url) for _ in range(3)]
        try:
            clients[0].send(frame(1, b"x" * 4999 + "ß".encode()))
            await until(lambda: held.held_bytes == 4 * 5000)
            clients[1].send(frame(2, b"x" * 5000))
            await until(lambda: held.held_bytes == 25_000)
            app.told.release()
            await until(lambda: held.held_bytes in (5000, 20_000) and app.taken == 1)
            clients[2].send(frame(1, "ß".encode() * 20_000))
            await until(lambda: server._omni.hub_metrics.http_cuts.labels("body_memory")._value.get() == 1)
            await until(lambda: held.held_bytes in (5000, 20_000))
        finally:
            for client in clients:
                client.close()
            for _ in clients:
                app.told.release()


async def test_a_thousand_messages_at_once_are_taken() -> None:
    app = Talker()
    async with server_of(app, ConnectionLimits()) as (url, _):
        client = await asyncio.to_thread(open_and_read, url)
        try:
            client.send(frame(1, b"x") * 1000)
            await until(lambda: app.came == 1000)
            assert not app.codes
        finally:
            client.close()


@pytest.mark.attack("G3")
async def test_more_messages_than_anybody_reads_end_the_websocket_and_its_application_hears_so() -> None:
    """1. a client reads what it is sent, and sends tiny messages without end: it is closed with 1008
    2. the application, which sends all the time, is told that the client is gone, not that it made a mistake
    """
    app = Talker()
    async with server_of(app, ConnectionLimits()) as (url, server):
        client = await asyncio.to_thread(open_and_read, url)
        try:
            await asyncio.to_thread(send_until_closed, client, frame(1, b"") * 4000)
            await until(lambda: app.codes and app.failures)
            assert app.codes == [1008]
            assert isinstance(app.failures[0], OSError), app.failures
            assert server._omni.hub_metrics.http_cuts.labels("too_fast")._value.get() == 1
        finally:
            client.close()


def open_and_read(url: str) -> Attacker:
    """A WebSocket whose client reads all that it is sent, in a thread that ends with the connection."""
    client = Attacker(url)
    client.open_stream()

    def read() -> None:
        with suppress(OSError):
            while client.socket.recv(1 << 16):
                pass

    threading.Thread(target=read, daemon=True).start()
    return client


def send_until_closed(client: Attacker, data: bytes) -> None:
    deadline_s = time.monotonic() + 30
    with suppress(OSError):
        while time.monotonic() < deadline_s:
            client.send(data)
        raise AssertionError("it is still open")


def streams(held: Connections[Any]) -> int:
    return sum(isinstance(each, BoundedWebSocket) for each in held.all())


async def until(holds: Any) -> None:
    deadline_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.02)
