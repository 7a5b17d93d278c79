"""POST /v1/chat/completions and clients that close their connection: no stage works on for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from hub.api.routes import build_app
from hub.api.server import HttpConfig, HttpServer
from omni_discovery.sockets.listen import bind
from tests.integration.hub.test_streaming_input import ONE
from tests.support.hub_fakes import deploy_of, until
from tests.support.local_replica import LocalReplica
from tests.support.quiet import soon_s
from tests.support.serving import HUBS, hub_of


@asynccontextmanager
async def served(replica: LocalReplica, http: HttpConfig | None = None) -> AsyncIterator[int]:
    """The port of a hub before this replica."""
    async with hub_of(ONE, replica) as omni:
        listeners = bind("127.0.0.1", 0)
        server = HttpServer(omni, build_app(omni, deploy_of(ONE), 0), http)
        server.start(listeners)
        try:
            yield listeners[0].getsockname()[1]
        finally:
            await server.stop()


async def ask(port: int, prompt: str, *, stream: bool, n: int = 1) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"messages": [{"role": "user", "content": prompt}], "stream": stream, "n": n}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("delay_s", [0.02, 30.0], ids=["amid the answer", "before any of it"])
async def test_a_client_that_leaves_ends_its_request_at_once(stream: bool, delay_s: float) -> None:
    """1. a long answer is made, or none of it has come yet; 2. the client is gone: so is the work for it
    3. the next client is served
    """
    with LocalReplica(HUBS, capacity=2, delay_s=delay_s) as replica:
        async with served(replica) as port:
            reader, writer = await ask(port, "word " * 10_000, stream=stream)
            await until(lambda: len(replica.loop) == 1, 5.0)
            if stream and delay_s < 1.0:
                async with asyncio.timeout(5.0):
                    await reader.readuntil(b"data: ")
            writer.transport.abort()
            async with asyncio.timeout(soon_s(2.0)):
                await until(lambda: len(replica.loop) == 0)
            if delay_s < 1.0:
                reader, writer = await ask(port, "word", stream=stream)
                async with asyncio.timeout(5.0):
                    assert b"word" in await reader.readuntil(b"[DONE]" if stream else b'"usage"')
                writer.close()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_client_that_leaves_ends_all_the_answers_that_it_asked_for(stream: bool) -> None:
    with LocalReplica(HUBS, capacity=4, delay_s=0.02) as replica:
        async with served(replica) as port:
            _, writer = await ask(port, "word " * 10_000, stream=stream, n=3)
            await until(lambda: len(replica.loop) == 3, 30.0)
            writer.transport.abort()
            await until(lambda: len(replica.loop) == 0, 30.0)
            await until(lambda: not any("_pump" in repr(task) for task in asyncio.all_tasks()), 30.0)


async def test_an_answer_that_ends_ends_the_watch_over_its_client() -> None:
    """Requests of one connection, one after the other: no task of an earlier one is left."""
    with LocalReplica(HUBS, capacity=2) as replica:
        async with served(replica) as port:
            for stream in (True, False) * 3:
                reader, writer = await ask(port, "word", stream=stream)
                async with asyncio.timeout(5.0):
                    await reader.readuntil(b"[DONE]" if stream else b'"usage"')
                await until(lambda: not any("ClientWatch" in repr(task) for task in asyncio.all_tasks()), 4.0)
                writer.close()


async def test_headers_leave_before_the_first_piece_only_where_that_is_set() -> None:
    """1. nothing of a stream is made yet: its headers wait; 2. where a wait is set, they come when it is over"""
    with LocalReplica(HUBS, capacity=2, delay_s=30.0) as replica:
        async with served(replica) as port:
            reader, writer = await ask(port, "word", stream=True)
            await until(lambda: len(replica.loop) == 1, 5.0)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(1), 0.5)
            writer.transport.abort()
            await until(lambda: len(replica.loop) == 0, 4.0)
        async with served(replica, HttpConfig(headers_wait_s=0.2)) as port:
            reader, writer = await ask(port, "word", stream=True)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), soon_s(5.0))
            assert head.startswith(b"HTTP/1.1 200")
            assert len(replica.loop) == 1
            writer.transport.abort()
            await until(lambda: len(replica.loop) == 0, 4.0)
