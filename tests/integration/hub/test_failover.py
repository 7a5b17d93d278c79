"""Replicas that die, refuse or say nothing: the request moves, or ends with the real reason."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from omni_discovery import wire
from omni_discovery.errors import (
    EngineFailedError,
    InvalidRequestError,
    OverloadedError,
    ReplicaLostError,
    StageUnavailableError,
)
from omni_discovery.records.schema import ReplicaStatus
from omni_discovery.wire import FailureKind
from tests.support.hub_fakes import (
    PAIR,
    QUICK,
    FakeReplica,
    accept_only,
    collect,
    echo,
    picture,
    running_hub,
    show,
    silence,
    text_of,
    until,
    with_status,
)
from tests.support.quiet import soon_s


def die(replica: FakeReplica, submit: wire.Submit) -> None:
    """Take the work, then go the way a killed process goes."""
    replica.accept(submit)
    replica.kill_soon()


def speak_then_die(replica: FakeReplica, submit: wire.Submit) -> None:
    replica.accept(submit)
    replica.chunk(submit, 0, text="half ")
    replica.kill_soon(after_s=0.1)


def speak_and_finish_then_die(replica: FakeReplica, submit: wire.Submit) -> None:
    echo(replica, submit)
    replica.kill_soon(after_s=0.02)


async def test_a_replica_killed_before_output_costs_the_client_nothing() -> None:
    """1. a takes the request and is killed
    2. another gets it within milliseconds, not after a timeout
    """
    a, *others = FakeReplica(die), FakeReplica(echo, replica_id=1), FakeReplica(echo, replica_id=2)
    async with running_hub(a, *others) as omni:
        begun_s = time.monotonic()
        outputs = await collect(omni.generate({"prompt": "to be"}))
        assert time.monotonic() - begun_s < soon_s(1.0)
        assert text_of(outputs) == "to be "
        assert [submit.attempt for each in others for submit in each.of(wire.Submit)] == [1]
        assert omni.metrics.get_sample_value("omni_hub_retries_total", {"stage": "0"}) == 1.0


async def test_a_replica_killed_after_output_ends_the_request_with_its_name() -> None:
    async with running_hub(FakeReplica(speak_then_die), FakeReplica(echo, replica_id=1)) as omni:
        outputs = omni.generate({"prompt": "x"})
        assert (await anext(outputs)).text == "half "
        begun_s = time.monotonic()
        with pytest.raises(ReplicaLostError, match="stage 0 replica 0/0"):
            await anext(outputs)
        # Its port refuses connections: nobody has to wait for the grace to end.
        assert time.monotonic() - begun_s < soon_s(1.0)


async def test_what_a_replica_said_before_it_died_still_counts() -> None:
    async with running_hub(FakeReplica(speak_and_finish_then_die)) as omni:
        assert text_of(await collect(omni.generate({"prompt": "last words"}))) == "last words "


async def test_a_dead_replica_is_not_picked_again() -> None:
    a, b = FakeReplica(echo), FakeReplica(echo, replica_id=1)
    async with running_hub(a, b) as omni:
        a.kill()
        await until(lambda: omni.stage_status()[0].pickable == 1)
        for _ in range(4):
            outputs = await collect(omni.generate({"prompt": "x"}))
            assert outputs[0].replica == "0/1"


async def test_a_replica_that_rejects_is_passed_over() -> None:
    a, b = FakeReplica(FakeReplica.reject), FakeReplica(echo, replica_id=1)
    async with running_hub(a, b) as omni:
        for _ in range(4):
            assert text_of(await collect(omni.generate({"prompt": "x"}))) == "x "


async def test_a_stage_that_is_full_everywhere_is_told_at_once() -> None:
    async with running_hub(FakeReplica(FakeReplica.reject), FakeReplica(FakeReplica.reject, replica_id=1)) as omni:
        begun_s = time.monotonic()
        with pytest.raises(OverloadedError):
            await collect(omni.generate({"prompt": "x"}))
        assert time.monotonic() - begun_s < soon_s(0.4)


async def test_a_request_that_no_replica_could_serve_is_not_tried_twice() -> None:
    refuse = [FakeReplica(lambda r, s: r.reject(s, FailureKind.INVALID), replica_id=number) for number in (0, 1)]
    async with running_hub(*refuse) as omni:
        with pytest.raises(InvalidRequestError):
            await collect(omni.generate({"prompt": "x"}))
        assert sum(len(replica.of(wire.Submit)) for replica in refuse) == 1


async def test_a_failed_engine_is_tried_elsewhere_then_told() -> None:
    def break_down(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        replica.fail(submit)

    async with running_hub(FakeReplica(break_down), FakeReplica(break_down, replica_id=1)) as omni:
        with pytest.raises(EngineFailedError, match="it broke"):
            await collect(omni.generate({"prompt": "x"}))


async def test_a_replica_that_does_not_answer_a_dispatch_loses_it() -> None:
    """1. a reads the work and says nothing: a big process that dies slowly
    2. after the accept timeout b gets it, and a is told to stop should it ever wake up
    """
    a, b = FakeReplica(silence), FakeReplica(echo, replica_id=1)
    async with running_hub(a, b) as omni:
        assert text_of(await collect(omni.generate({"prompt": "x"}))) == "x "
        await until(lambda: bool(a.of(wire.Abort)))


async def test_a_painter_that_dies_at_work_has_another_paint() -> None:
    """The thinker's hand-off is kept until the end, so it need not think again."""
    thinker = FakeReplica(echo)
    painters = FakeReplica(die, stage_id=1), FakeReplica(picture, stage_id=1, replica_id=1)
    async with running_hub(thinker, *painters, deploy=PAIR) as omni:
        outputs = await collect(omni.generate({"prompt": "a cat"}, modalities=["image"]))
        assert [output.data for output in outputs if output.data] == [b"PNG"]
        await until(lambda: thinker.of(wire.ReleasePayloads))
        kinds = [type(message) for message in thinker.received if not isinstance(message, wire.Hello)]
        assert kinds == [wire.Submit, wire.ReleasePayloads]
        assert painters[1].of(wire.Submit)[0].payloads == painters[0].of(wire.Submit)[0].payloads


async def test_a_stage_without_replicas_is_named_after_the_wait() -> None:
    async with running_hub(FakeReplica(echo), deploy=PAIR) as omni:
        with pytest.raises(StageUnavailableError, match=r"no UP replica for stage 1 after 1\.0s") as caught:
            await collect(omni.generate({"prompt": "x"}, modalities=["image"]))
        assert caught.value.stage_id == 1


async def test_a_replica_that_appears_while_a_request_waits_gets_it() -> None:
    late = FakeReplica(echo)
    try:
        async with running_hub() as omni:
            outputs = omni.generate({"prompt": "patience"})
            first = asyncio.ensure_future(anext(outputs))
            show(omni, late.info)
            assert (await first).text == "patience "
            await outputs.aclose()
    finally:
        late.kill()


async def test_a_removed_key_stops_picks_and_lets_the_work_finish() -> None:
    """1. a works on a request; its key is removed
    2. nothing new goes to a
    3. a finishes; its output reaches the client; then its sockets are let go
    """
    a, b = FakeReplica(accept_only), FakeReplica(echo, replica_id=1)
    async with running_hub(a, b) as omni:
        outputs = omni.generate({"prompt": "x"})
        first = asyncio.ensure_future(anext(outputs))
        await until(lambda: len(a.of(wire.Submit)) == 1)
        show(omni, b.info)
        await until(lambda: omni.stage_status()[0].registered == 1)
        assert [(await collect(omni.generate({"prompt": "y"})))[0].replica for _ in range(3)] == ["0/1"] * 3
        (submit,) = a.of(wire.Submit)
        a.chunk(submit, 0, text="done after all")
        a.done(submit, 1)
        assert (await first).text == "done after all"
        assert [output.finish_reason async for output in outputs] == ["stop", "done"]


async def test_a_replica_that_reports_an_error_loses_its_work() -> None:
    a, b = FakeReplica(accept_only), FakeReplica(echo, replica_id=1)
    async with running_hub(a, b) as omni:
        first = asyncio.ensure_future(anext(omni.generate({"prompt": "moved"})))
        await until(lambda: len(a.of(wire.Submit)) == 1)
        show(omni, with_status(a.info, ReplicaStatus.ERROR), b.info)
        assert (await first).text == "moved "


async def test_a_replica_that_got_the_port_of_a_dead_one_of_another_stage_keeps_its_client() -> None:
    """1. a replica of stage 0 dies; the kernel gives its port to a new one of stage 1
    2. the dead one's key expires last: that takes nothing from the new one
    """
    thinker, painter = FakeReplica(echo), FakeReplica(picture, stage_id=1)
    dead = replace(painter.info, stage_id=0, replica_id=5, curve_public_key=thinker.info.curve_public_key)
    async with running_hub(thinker, deploy=PAIR) as omni:
        show(omni, thinker.info, dead)
        await until(lambda: omni.stage_status()[0].registered == 2)
        show(omni, thinker.info, dead, painter.info)
        await until(lambda: omni.stage_status()[1].pickable == 1)
        show(omni, thinker.info, painter.info)
        await until(lambda: omni.stage_status()[0].registered == 1)
        outputs = await collect(omni.generate({"prompt": "a cat"}))
        assert b"PNG" in [output.data for output in outputs]
    painter.kill()


async def test_a_replica_that_was_only_slow_is_better_than_nobody() -> None:
    """1. a does not answer the first dispatch in time, and b gets it
    2. b dies with it; nobody is left but a, which is well again
    """

    def late(replica: FakeReplica, submit: wire.Submit) -> None:
        if submit.attempt:
            echo(replica, submit)

    a, b = FakeReplica(late), FakeReplica(die, replica_id=1)
    config = replace(QUICK, accept_timeout_s=0.1, accept_limit_s=5.0)
    async with running_hub(a, b, config=config) as omni:
        assert text_of(await collect(omni.generate({"prompt": "x"}))) == "x "
        assert [len(each.of(wire.Submit)) for each in (a, b)] == [2, 1]
