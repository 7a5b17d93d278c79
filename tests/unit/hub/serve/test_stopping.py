"""What ends a hub, and how a second signal shortens it."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from hub.api import server as http_server
from hub.api.door.tls import TlsFiles, load_context
from hub.api.server import HttpServer
from hub.serve import app
from hub.serve.local_stages import StageEnd
from omni_discovery.errors import ConfigError, OmniError
from omni_discovery.sockets.listen import bind
from tests.support.certificates import make_certificates

if TYPE_CHECKING:
    from starlette.requests import Request

    from hub.async_omni import AsyncOmni


class FakeOmni:
    """One answer that stays open until its requests are ended."""

    def __init__(self) -> None:
        self.begun, self.ended = asyncio.Event(), asyncio.Event()
        self.app = Starlette(routes=[Route("/", self.answer)])

    async def answer(self, _: Request) -> Response:
        self.begun.set()
        await self.ended.wait()
        return PlainTextResponse("ended by the hub")

    def end_requests(self) -> None:
        self.ended.set()


async def test_open_answers_get_no_time_once_it_hurries(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. an answer is open, and a hub that stops would give it ten minutes; 2. it hurries: the answer ends at once"""
    monkeypatch.setattr(http_server, "_GRACE_S", 600)
    omni = FakeOmni()
    server = HttpServer(cast("AsyncOmni", omni), omni.app)
    with ExitStack() as sockets:
        listeners = [sockets.enter_context(each) for each in bind("127.0.0.1", 0)]
        server.start(listeners)
        reader, writer = await asyncio.open_connection(*listeners[0].getsockname())
        writer.write(b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        await omni.begun.wait()
        stopping = asyncio.create_task(server.stop())
        await asyncio.sleep(0.1)
        assert not stopping.done()
        assert not omni.ended.is_set()
        server.hurry()
        async with asyncio.timeout(60.0):
            await stopping
            assert (await reader.read()).endswith(b"ended by the hub")
        writer.close()


@pytest.mark.parametrize("with_tls", [False, True])
async def test_a_client_that_the_kernel_has_connected_is_served_by_a_hub_that_stops(
    tmp_path: Path, *, with_tls: bool
) -> None:
    """1. the loop is busy, and the kernel connects a client; 2. the hub stops to listen: that client is answered"""
    files = make_certificates(tmp_path)
    omni = FakeOmni()
    omni.ended.set()
    server = HttpServer(
        cast("AsyncOmni", omni),
        omni.app,
        tls=load_context(TlsFiles(files.server_cert, files.server_key)) if with_tls else None,
    )
    with ExitStack() as sockets:
        listeners = [sockets.enter_context(each) for each in bind("127.0.0.1", 0)]
        server.start(listeners)
        await asyncio.sleep(0.1)
        where = listeners[0].getsockname()[:2]
        # Nothing of this lets the loop run.
        client = socket.create_connection(where, timeout=30.0)
        await server._server.stop_listening()
        async with asyncio.timeout(60.0):
            answer = await asyncio.to_thread(ask_and_read, client, files.ca if with_tls else None)
            assert answer.endswith(b"ended by the hub")
            with pytest.raises(ConnectionRefusedError):
                await asyncio.to_thread(socket.create_connection, where, 30.0)
            await server.stop()


def ask_and_read(client: socket.socket, ca: str | None) -> bytes:
    """What a client gets that is connected already."""
    with (
        client
        if ca is None
        else ssl.create_default_context(cafile=ca).wrap_socket(client, server_hostname="localhost") as stream
    ):
        stream.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        parts = []
        while part := stream.recv(4096):
            parts.append(part)
        return b"".join(parts)


NO_SERVERS: Any = SimpleNamespace(restart_ended=lambda: None, missing=str)


class FakeStages:
    """Local stages of which one has ended."""

    def __init__(self, *ends: StageEnd) -> None:
        self.ends = list(ends)
        self.looks = 0

    def restart_ended(self) -> list[StageEnd]:
        self.looks += 1
        ends, self.ends = self.ends, []
        return ends

    def starting(self) -> dict[int, int]:
        return {}


async def test_a_stage_that_is_misconfigured_ends_the_hub_only_if_it_never_was_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "_SUPERVISOR_CHECK_S", 0.01)
    omni = cast("Any", SimpleNamespace(is_running=True, is_revoked=False, stage_status=tuple, serving_replicas=dict))
    hub = app._Hub(cast("Any", None), "", cast("Any", SimpleNamespace(url="")), None)
    with pytest.raises(ConfigError, match="stage 3 can't run here"):
        await hub._serve(cast("Any", FakeStages(StageEnd(3, 2, was_up=False))), omni, NO_SERVERS)
    stages = FakeStages(StageEnd(3, 2, was_up=True), StageEnd(1, 1, was_up=False), StageEnd(2, 0, was_up=False))
    serving = asyncio.create_task(hub._serve(cast("Any", stages), omni, NO_SERVERS))
    async with asyncio.timeout(60.0):
        while stages.looks < 3:
            assert not serving.done()
            await asyncio.sleep(0.01)
        hub._stop()
        assert await serving == 0


async def test_a_hub_that_has_failed_says_so_last() -> None:
    hub = app._Hub(cast("Any", None), "", cast("Any", SimpleNamespace(url="")), None)
    with pytest.raises(OmniError, match=r"hub\.died above says why") as caught:
        await hub._serve(cast("Any", FakeStages()), cast("Any", SimpleNamespace(is_running=False)), NO_SERVERS)
    assert not isinstance(caught.value, ConfigError)


async def test_the_first_signal_stops_and_only_the_second_hurries() -> None:
    hurried: list[str] = []
    hub = app._Hub(cast("Any", None), "", cast("Any", SimpleNamespace(url="")), None)
    hub._stop()
    hub._on_hurry = (lambda: hurried.append("http"), lambda: hurried.append("stages"))
    assert hub._stopping.is_set()
    assert hurried == []
    hub._stop()
    assert hurried == ["http", "stages"]
