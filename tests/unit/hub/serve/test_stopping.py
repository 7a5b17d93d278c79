"""What ends a hub, and how a second signal shortens it."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from hub.api import server as http_server
from hub.api.server import HttpServer
from hub.serve import app
from hub.serve.local_stages import StageEnd
from omni_discovery.errors import ConfigError, OmniError
from omni_discovery.sockets.listen import bind

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
        await hub._serve(cast("Any", FakeStages(StageEnd(3, 2, was_up=False))), omni)
    stages = FakeStages(StageEnd(3, 2, was_up=True), StageEnd(1, 1, was_up=False), StageEnd(2, 0, was_up=False))
    serving = asyncio.create_task(hub._serve(cast("Any", stages), omni))
    async with asyncio.timeout(60.0):
        while stages.looks < 3:
            assert not serving.done()
            await asyncio.sleep(0.01)
        hub._stop()
        assert await serving == 0


async def test_a_hub_that_has_failed_says_so_last() -> None:
    hub = app._Hub(cast("Any", None), "", cast("Any", SimpleNamespace(url="")), None)
    with pytest.raises(OmniError, match=r"hub\.died above says why") as caught:
        await hub._serve(cast("Any", FakeStages()), cast("Any", SimpleNamespace(is_running=False)))
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
