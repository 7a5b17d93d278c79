"""Requests that one HTTP request asks for side by side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from hub.api.exchange import Exchange
from hub.api.generation import running
from hub.api.generation.running import Ask, Came, Generation, Route
from hub.request.outputs import OmniOutput
from omni_discovery.errors import EngineFailedError
from tests.support.hub_fakes import ONE_STAGE, deploy_of


class _Omni:
    """Notes in which turn of the loop each request began."""

    def __init__(self) -> None:
        self.is_traced, self.turn = False, 0
        self.began_in: list[int] = []

    async def generate(self, _inputs: Any, *, request_id: str, **_more: Any) -> AsyncGenerator[str, None]:
        self.began_in.append(self.turn)
        yield request_id

    async def count_turns(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)


OUTPUT = OmniOutput("r", 0, "text", text="a")


class _Slow:
    """Puts out two outputs, or an error, when it may go on."""

    def __init__(self, *, fails: bool = False) -> None:
        self.is_traced, self.is_closed, self.goes_on = False, False, asyncio.Event()
        self._fails = fails

    async def generate(self, _inputs: Any, **_more: Any) -> AsyncGenerator[OmniOutput, None]:
        try:
            await self.goes_on.wait()
            if self._fails:
                raise EngineFailedError("no")
            yield OUTPUT
            yield OUTPUT
        finally:
            self.is_closed = True


async def _never() -> dict[str, str]:
    await asyncio.Event().wait()
    return {}


@pytest.mark.attack("I6")
async def test_others_get_a_turn_of_the_loop_between_two_answers_of_one_request() -> None:
    """Each of them is checked and sent by itself: with a long prompt, 16 in one turn stopped the hub for a second."""
    omni: Any = _Omni()
    request: Any = SimpleNamespace(receive=_never, headers={}, scope={})
    fields: Any = SimpleNamespace(timeout=None, priority=0, async_chunk=None)
    counting = asyncio.create_task(omni.count_turns())
    generation = Generation(omni, Came(request, Exchange(), 0.0), fields, [Ask({}, {})] * 16)
    try:
        came = [number async for number, _ in generation]
    finally:
        await generation.close()
        counting.cancel()
    assert sorted(came) == list(range(16))
    assert len(set(omni.began_in)) == 16


async def test_each_answer_to_a_long_body_has_a_turn_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each checks and sends all of the body again: the first is part of the turn in which the body was read."""
    turns: list[int] = []

    async def long_body(_scope: Any, size_bytes: int) -> None:
        turns.append(size_bytes)
        await asyncio.sleep(0)

    monkeypatch.setattr(running, "long_body", long_body)
    omni: Any = _Omni()
    request: Any = SimpleNamespace(receive=_never, headers={}, scope={})
    fields: Any = SimpleNamespace(timeout=None, priority=0, async_chunk=None)
    generation = Generation(omni, Came(request, Exchange(), 0.0, size_bytes=50_000), fields, [Ask({}, {})] * 4)
    try:
        assert sorted([number async for number, _ in generation]) == [0, 1, 2, 3]
    finally:
        await generation.close()
    assert turns == [50_000] * 3


@pytest.mark.attack("O8")
async def test_companions_count_for_what_a_client_may_have_under_way() -> None:
    """Each is a request of its own to the first stage: 16 answers with eight of them are 144."""
    charged: list[int] = []
    omni: Any = _Omni()
    omni.rejections = SimpleNamespace(counted=nullcontext)
    request: Any = SimpleNamespace(receive=_never, headers={}, scope={})
    fields: Any = SimpleNamespace(timeout=None, priority=0, async_chunk=None)
    route, came = Route(omni, deploy_of(ONE_STAGE), "test"), Came(request, Exchange(), 0.0)
    came.exchange.charge = charged.append
    for asks in ([Ask({}, {})], [Ask({}, {}, None, {"no": {"prompt": "x"}, "yes": {"prompt": "y"}})] * 2):
        await route.generation(came, fields, asks).close()
    assert charged == [0, 5]


@pytest.mark.parametrize("fails", [False, True], ids=["an output", "an error"])
async def test_headers_that_leave_first_are_followed_by_all_outputs(fails: bool) -> None:
    """1. nothing came when the headers have to leave; 2. the first output, or the error, is the reader's then"""
    omni: Any = _Slow(fails=fails)
    request: Any = SimpleNamespace(receive=_never, headers={}, scope={"omni.headers_latest_s": time.monotonic() + 0.02})
    fields: Any = SimpleNamespace(timeout=None, priority=0, async_chunk=None)
    generation = Generation(omni, Came(request, Exchange(), 0.0), fields, [Ask({}, {})])
    try:
        await generation.begin()
        omni.goes_on.set()
        if fails:
            with pytest.raises(EngineFailedError):
                [each async for each in generation.outputs()]
        else:
            assert [each async for each in generation.outputs()] == [(0, OUTPUT), (0, OUTPUT)]
    finally:
        await generation.close()
    assert omni.is_closed


async def test_a_stream_that_ends_before_its_first_output_leaves_nothing_behind() -> None:
    omni: Any = _Slow()
    request: Any = SimpleNamespace(receive=_never, headers={}, scope={"omni.headers_latest_s": 0.0})
    fields: Any = SimpleNamespace(timeout=None, priority=0, async_chunk=None)
    generation = Generation(omni, Came(request, Exchange(), 0.0), fields, [Ask({}, {})])
    await generation.begin()
    # The wait for the first output begins in the next turn.
    await asyncio.sleep(0)
    await generation.close()
    assert omni.is_closed
