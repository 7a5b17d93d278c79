"""Companions over real sockets: one replica for all, one fate for all."""

from __future__ import annotations

import asyncio

import pytest

from hub.orchestrator.active import AbortRequest
from hub.orchestrator.orchestrator import Orchestrator
from hub.request.machine import RequestMachine
from omni_discovery import wire
from omni_discovery.errors import EngineFailedError, RequestError
from tests.support.hub_fakes import FakeReplica, accept_only, collect, echo, picture, running_hub, until

PAIR = "stages: [{stage_id: 0, engine: e, final_output: text}, {stage_id: 1, engine: e, final_output: image}]"
NEGATIVE = {"negative": {"prompt": "blurry"}}


async def test_parent_and_companions_share_a_replica_and_are_collected() -> None:
    """1. eight requests with a companion each over three thinkers: each pair is on one of them
    2. the painter gets both hand-offs, by role; 3. in the end all of it is released
    """
    thinkers = [FakeReplica(echo, replica_id=number) for number in range(3)]
    painter = FakeReplica(picture, stage_id=1)
    async with running_hub(*thinkers, painter, deploy=PAIR) as omni:
        asked = [omni.generate({"prompt": f"cat {number}"}, companions=NEGATIVE) for number in range(8)]
        for outputs in await asyncio.gather(*map(collect, asked)):
            assert [output.data for output in outputs if output.data] == [b"PNG"]
        for thinker in thinkers:
            submits = thinker.of(wire.Submit)
            parents = {submit.request_id for submit in submits if "%" not in submit.request_id}
            companions = {submit.request_id.partition("%")[0] for submit in submits if "%" in submit.request_id}
            assert parents == companions != set()
            await until(lambda thinker=thinker: len(thinker.of(wire.ReleasePayloads)) == len(thinker.of(wire.Submit)))
        assert [[ref.role for ref in submit.payloads] for submit in painter.of(wire.Submit)] == [["", "negative"]] * 8
        assert omni._orchestrator is not None
        assert not omni._orchestrator.request_states


async def test_a_companion_whose_replica_dies_moves_and_nobody_waits() -> None:
    """The companion's own loss is retried like any other work."""

    def dies_with_companion(replica: FakeReplica, submit: wire.Submit) -> None:
        if "%" in submit.request_id:
            replica.accept(submit)
            replica.kill_soon()
        else:
            echo(replica, submit)

    # Only one has a slot to begin with: the parent goes there.
    first, second = FakeReplica(dies_with_companion), FakeReplica(echo, replica_id=1)
    painter = FakeReplica(picture, stage_id=1)
    async with running_hub(first, second, painter, deploy=PAIR) as omni:
        outputs = await collect(omni.generate({"prompt": "a cat"}, companions=NEGATIVE))
        assert [output.data for output in outputs if output.data] == [b"PNG"]
        assert ["%" in submit.request_id for submit in second.of(wire.Submit)] == [True]


async def test_a_companion_that_fails_ends_the_request_with_one_error() -> None:
    def fails_companion(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        if "%" in submit.request_id:
            replica.fail(submit, wire.FailureKind.INVALID)

    thinker, painter = FakeReplica(fails_companion), FakeReplica(picture, stage_id=1)
    async with running_hub(thinker, painter, deploy=PAIR) as omni:
        with pytest.raises(RequestError, match="companion 'negative'"):
            await collect(omni.generate({"prompt": "a cat"}, companions=NEGATIVE))
        await until(lambda: thinker.of(wire.Abort))
        assert not painter.of(wire.Submit)


async def test_an_abort_reaches_the_companions_too() -> None:
    thinker, painter = FakeReplica(accept_only), FakeReplica(picture, stage_id=1)
    async with running_hub(thinker, painter, deploy=PAIR) as omni:
        outputs = asyncio.ensure_future(collect(omni.generate({"prompt": "x"}, request_id="r", companions=NEGATIVE)))
        await until(lambda: len(thinker.of(wire.Submit)) == 2)
        await omni.abort("r")
        # Acknowledged: when abort returns, nothing of it runs on.
        aborted = {abort.request_id for abort in thinker.of(wire.Abort)}
        assert aborted == {submit.request_id for submit in thinker.of(wire.Submit)}
        assert [output.finish_reason for output in await outputs] == ["abort"]


async def test_a_companion_that_is_aborted_alone_fails_its_parent_with_one_error() -> None:
    thinker, painter = FakeReplica(accept_only), FakeReplica(picture, stage_id=1)
    async with running_hub(thinker, painter, deploy=PAIR) as omni:
        outputs = asyncio.ensure_future(collect(omni.generate({"prompt": "x"}, companions=NEGATIVE)))
        await until(lambda: len(thinker.of(wire.Submit)) == 2)
        orchestrator = omni._orchestrator
        assert orchestrator is not None
        companion_id = next(submit.request_id for submit in thinker.of(wire.Submit) if "%" in submit.request_id)
        orchestrator.rpc_async_queue.put_nowait(AbortRequest(companion_id))
        with pytest.raises(RequestError, match="companion 'negative': it was aborted"):
            await outputs
        await until(lambda: len({abort.request_id for abort in thinker.of(wire.Abort)}) == 2)


async def test_a_late_abort_of_a_companion_that_is_done_hurts_nobody() -> None:
    """1. the companion has handed over, its parent still works; 2. the companion is aborted: the abort is answered
    3. the parent ends with its picture, made with the companion's hand-off
    """
    parents: list[wire.Submit] = []

    def slow_parent(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        if "%" in submit.request_id:
            replica.done(submit, 0)
        else:
            parents.append(submit)

    thinker, painter = FakeReplica(slow_parent), FakeReplica(picture, stage_id=1)
    async with running_hub(thinker, painter, deploy=PAIR) as omni:
        outputs = asyncio.ensure_future(collect(omni.generate({"prompt": "x"}, companions=NEGATIVE)))
        orchestrator = omni._running_orchestrator()
        await until(lambda: any("%" in name and each.is_done for name, each in machines(orchestrator)))
        companion_id = next(name for name, _ in machines(orchestrator) if "%" in name)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        orchestrator.rpc_async_queue.put_nowait(AbortRequest(companion_id, done=done))
        assert await asyncio.wait_for(done, 30.0) is None
        thinker.done(parents[0], 0)
        assert any(output.data for output in await outputs)
        (submit,) = painter.of(wire.Submit)
        assert {ref.role for ref in submit.payloads} == {"", "negative"}


def machines(orchestrator: Orchestrator) -> list[tuple[str, RequestMachine]]:
    return [(name, active.machine) for name, active in orchestrator._requests.active.items()]


async def test_one_that_hands_nothing_over_fails_the_request() -> None:
    def silent_companion(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        replica.done(submit, 0, hands_over="%" not in submit.request_id)

    thinker, painter = FakeReplica(silent_companion), FakeReplica(picture, stage_id=1)
    async with running_hub(thinker, painter, deploy=PAIR) as omni:
        with pytest.raises(EngineFailedError, match="handed nothing over for stage 1"):
            await collect(omni.generate({"prompt": "a cat"}, companions=NEGATIVE))
