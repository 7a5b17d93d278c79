"""What users of vLLM-Omni's orchestrator rely on, statement by statement, and what held up or broke it as a whole.

The requests here run beside one that is stuck, slow, wrong or broken: they must not feel it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from hub.api.routes import build_app
from hub.async_omni import AsyncOmni
from hub.orchestrator.active import AbortRequest
from hub.orchestrator.orchestrator import Orchestrator
from hub.orchestrator.requests import Requests
from hub.request.machine import RequestMachine
from omni_discovery import wire
from omni_discovery.errors import ReplicaLostError, RequestError
from tests.support.hub_fakes import (
    ONE_STAGE,
    PAIR,
    QUICK,
    FakeReplica,
    accept_only,
    collect,
    deploy_of,
    echo,
    picture,
    running_hub,
    show,
    text_of,
    until,
)
from tests.support.quiet import soon_s

PATIENT = replace(QUICK, pick_timeout_s=10.0)


def orchestrator_of(omni: AsyncOmni) -> Orchestrator:
    assert omni._orchestrator is not None
    return omni._orchestrator


async def ask(omni: AsyncOmni, prompt: str = "next", **more: Any) -> str:
    return text_of(await collect(omni.generate({"prompt": prompt}, **more)))


# ---- statements


async def test_statement_81_the_death_of_a_replica_hurts_only_what_is_bound_to_it() -> None:
    """1. each of two replicas has shown words without their tokens: neither request can go on elsewhere
    2. one dies: its request fails by its name; the other one's ends well, untouched
    """

    def begin(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        replica.chunk(submit, 0, text="half")

    first, second = FakeReplica(begin), FakeReplica(begin, replica_id=1)
    async with running_hub(first, second) as omni:
        streams = [omni.generate({"prompt": "x"}) for _ in range(2)]
        of: dict[str, AsyncIterator[Any]] = {(await anext(stream)).replica: stream for stream in streams}
        assert set(of) == {"0/0", "0/1"}
        first.kill()
        with pytest.raises(ReplicaLostError, match="0/0"):
            await collect(of["0/0"])
        (submit,) = second.of(wire.Submit)
        second.chunk(submit, 1, text=" and whole")
        second.done(submit, 2)
        assert [output.finish_reason for output in await collect(of["0/1"])] == [None, "stop", "done"]


async def test_statement_84_outputs_of_requests_that_nobody_knows_are_dropped() -> None:
    """Of one that never was, and of one that is over."""

    def say_more_than_asked(replica: FakeReplica, submit: wire.Submit) -> None:
        stranger = wire.Submit(epoch=submit.epoch, request_id="nobody's")
        for each in (stranger, *replica.of(wire.Submit)[:-1]):
            replica.accept(each)
            replica.chunk(each, 0, text="?")
            replica.done(each, 1)
            replica.fail(each)
        echo(replica, submit)

    async with running_hub(FakeReplica(say_more_than_asked)) as omni:
        assert [await ask(omni, word) for word in ("a", "b", "c")] == ["a ", "b ", "c "]
        # Three frames of each that count for nothing: the stranger three times, and the two that were over.
        assert omni.metrics.get_sample_value("omni_hub_dropped_frames_total", {"reason": "stale"}) == 3 * (3 + 3)
        assert orchestrator_of(omni).request_states == {}


async def test_statement_85_an_abort_that_wants_an_answer_always_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a request that is not there, that a silent replica runs, and when the abort itself goes wrong."""
    replica = FakeReplica(accept_only)
    replica.acknowledges_aborts = False
    async with running_hub(replica) as omni:
        orchestrator, loop = orchestrator_of(omni), asyncio.get_running_loop()

        async def abort(request_id: str) -> BaseException | None:
            done = loop.create_future()
            orchestrator.rpc_async_queue.put_nowait(AbortRequest(request_id, done=done))
            await asyncio.wait({done}, timeout=30.0)
            return done.exception()

        assert await abort("nobody's") is None
        reading = asyncio.create_task(collect(omni.generate({"prompt": "x"})))
        await until(lambda: len(replica.of(wire.Submit)) == 1)
        (request_id,) = orchestrator.request_states
        orchestrator.rpc_async_queue.put_nowait(AbortRequest("nobody's"))
        assert isinstance(await abort(request_id), TimeoutError)
        assert [output.finish_reason for output in await reading] == ["abort"]
        with monkeypatch.context() as patched:
            patched.setattr(Requests, "abort_request", broken)
            assert isinstance(await abort("whoever's"), RuntimeError)
        assert omni.is_running


def broken(*_: object) -> None:
    raise ZeroDivisionError


async def test_statement_87_a_value_that_no_frame_can_hold_is_that_requests_400() -> None:
    """The integer is too large for the wire; a neighbour streams on, and the next request is served."""

    def one_word_then_wait(replica: FakeReplica, submit: wire.Submit) -> None:
        if len(replica.of(wire.Submit)) == 1:
            replica.accept(submit)
            replica.chunk(submit, 0, text="word ")
        else:
            echo(replica, submit)

    replica = FakeReplica(one_word_then_wait)
    async with running_hub(replica) as omni:
        neighbour = omni.generate({"prompt": "x"})
        await anext(neighbour)
        transport = httpx.ASGITransport(build_app(omni, deploy_of(ONE_STAGE), 0))
        async with httpx.AsyncClient(transport=transport, base_url="http://hub") as client:
            body = {"messages": [{"role": "user", "content": "x"}], "sampling_params_list": [{"seed": 1 << 80}]}
            answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert await ask(omni) == "next "
        replica.done(replica.of(wire.Submit)[0], 1)
        assert [output.finish_reason for output in await collect(neighbour)] == ["stop", "done"]


# ---- nobody is held up


async def test_a_request_that_waits_for_a_stage_holds_up_neither_others_nor_its_own_cure() -> None:
    """1. nobody serves the second stage: a request waits for it, for up to ten seconds
    2. meanwhile others stream, are taken, are aborted, in moments
    3. a replica for it appears and is let in: the first request ends well
    """
    thinker, painter = FakeReplica(echo), FakeReplica(picture, stage_id=1)
    async with running_hub(thinker, deploy=PAIR, config=PATIENT) as omni:
        stuck = asyncio.create_task(collect(omni.generate({"prompt": "stuck"})))
        await until(lambda: len(orchestrator_of(omni).stage_pools[1].core.queue) == 1)
        begun_s = time.monotonic()
        answers = await asyncio.gather(*(ask(omni, f"n{number}", modalities=["text"]) for number in range(50)))
        assert answers == [f"n{number} " for number in range(50)]
        left = omni.generate({"prompt": "left"}, request_id="left")
        await anext(left)
        await omni.abort("left")
        show(omni, thinker.info, painter.info)
        assert [output.data for output in await stuck if output.data] == [b"PNG"]
        assert time.monotonic() - begun_s < soon_s(8.0)
        await left.aclose()
        painter.kill()


async def test_a_client_that_reads_nothing_costs_others_nothing() -> None:
    """1. one client takes the first word of five hundred and reads no more
    2. others are served as ever, and what waits for it is bounded
    3. when it reads again, not a word is missing
    """
    words = [f"w{number}" for number in range(500)]

    def talk(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        said = words if submit.inputs["prompt"] == "all" else [str(submit.inputs["prompt"])]
        for seq, word in enumerate(said):
            replica.chunk(submit, seq, text=word + " ")
        replica.done(submit, len(said))

    slow_replica, replica = FakeReplica(talk), FakeReplica(talk, replica_id=1)
    async with running_hub(slow_replica, replica, config=replace(QUICK, max_queued_outputs=64)) as omni:
        slow = omni.generate({"prompt": "all"})
        first = await anext(slow)
        for number in range(50):
            assert await ask(omni, f"n{number}") == f"n{number} "
        (queue,) = omni._queues.values()
        assert len(queue._outputs) <= 64
        assert text_of([first, *await collect(slow)]).split() == words


async def test_a_hub_with_nothing_to_do_takes_no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is polled: sessions stand, a request runs and says nothing."""
    turns = 0
    take_turn = Orchestrator._take_turn

    def counted(self: Orchestrator) -> None:
        nonlocal turns
        turns += 1
        take_turn(self)

    replica = FakeReplica(accept_only)
    async with running_hub(replica) as omni:
        reading = asyncio.create_task(collect(omni.generate({"prompt": "x"})))
        await until(lambda: len(replica.of(wire.Submit)) == 1)
        await asyncio.sleep(0.1)
        monkeypatch.setattr(Orchestrator, "_take_turn", counted)
        await asyncio.sleep(1.0)
        assert turns < 10
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


# ---- what is broken is broken alone


async def test_a_bug_in_the_machine_of_one_request_costs_that_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = RequestMachine.handle

    def stumble(self: RequestMachine, event: Any, now_s: float) -> Any:
        if self.state.public.prompt["prompt"] == "stumble":
            raise KeyError("a field that was never there")
        return handle(self, event, now_s)

    monkeypatch.setattr(RequestMachine, "handle", stumble)
    async with running_hub(FakeReplica(echo)) as omni:
        results = await asyncio.gather(ask(omni, "stumble"), ask(omni, "a"), ask(omni, "b"), return_exceptions=True)
        assert isinstance(results[0], RequestError)
        assert results[1:] == ["a ", "b "]
        assert orchestrator_of(omni).request_states == {}


@pytest.mark.parametrize("garbage", [b"", b"\xff" * 20, b"\x01\x81\xa1t\xa5chunk"])
async def test_an_output_that_makes_no_sense_fails_its_own_request_only(garbage: bytes) -> None:
    """The second piece is no message: what comes behind it shows that one is missing, on every replica."""

    def mumble(replica: FakeReplica, submit: wire.Submit) -> None:
        if submit.inputs["prompt"] != "mumble":
            return echo(replica, submit)
        replica.accept(submit)
        replica.chunk(submit, 0, text="one", modality="image", mime="image/png", attachments=[b"x"])
        replica._output.send([replica._hub, garbage])
        replica.chunk(submit, 2, text="three")
        return None

    async with running_hub(FakeReplica(mumble)) as omni:
        results = await asyncio.gather(ask(omni, "mumble"), ask(omni, "a"), return_exceptions=True)
        assert isinstance(results[0], ReplicaLostError)
        assert "piece 1 of the output never came" in str(results[0])
        assert results[1] == "a "
        assert omni.metrics.get_sample_value("omni_hub_dropped_frames_total", {"reason": "malformed"}) == 1.0
