"""How requests end other than well: cancelled, too late, too slow, too many; and how a hub ends."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from hub.api.routes import ready_response
from hub.async_omni import AsyncOmni
from hub.orchestrator.active import AbortRequest
from hub.orchestrator.requests import Requests
from omni_discovery import wire
from omni_discovery.curve import KeyPair
from omni_discovery.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    RequestError,
    StageUnavailableError,
)
from tests.support.hub_fakes import (
    ONE_STAGE,
    PAIR,
    QUICK,
    FakeReplica,
    accept_only,
    collect,
    deploy_of,
    echo,
    running_hub,
    text_of,
    until,
)
from tests.support.quiet import soon_s


def talk(replica: FakeReplica, submit: wire.Submit) -> None:
    """Accept and put out one word; the rest never comes."""
    replica.accept(submit)
    replica.chunk(submit, 0, text="word ")


async def test_closing_the_generator_aborts_the_stage_that_runs() -> None:
    replica = FakeReplica(talk)
    async with running_hub(replica) as omni:
        outputs = omni.generate({"prompt": "x"})
        await anext(outputs)
        await outputs.aclose()
        await until(lambda: bool(replica.of(wire.Abort)), timeout_s=2.0)
        assert replica.of(wire.Abort)[0].request_id == replica.of(wire.Submit)[0].request_id


async def test_cancelling_the_reader_aborts_and_releases_what_was_handed_over() -> None:
    """1. the thinker is done, the painter paints
    2. the reader is cancelled: the painter is told to stop, the thinker to forget its hand-off
    """
    thinker, painter = FakeReplica(echo), FakeReplica(accept_only, stage_id=1)
    async with running_hub(thinker, painter, deploy=PAIR) as omni:
        reader = asyncio.create_task(collect(omni.generate({"prompt": "x"})))
        await until(lambda: len(painter.of(wire.Submit)) == 1)
        reader.cancel()
        await until(lambda: bool(painter.of(wire.Abort)) and len(thinker.of(wire.ReleasePayloads)) == 1)
        assert thinker.of(wire.Abort) == []


async def test_cancelling_while_no_replica_is_there_leaves_nothing_behind() -> None:
    replica = FakeReplica()
    async with running_hub(replica, wait=False) as omni:
        reader = asyncio.create_task(collect(omni.generate({"prompt": "x"})))
        await asyncio.sleep(0)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await until(lambda: omni.stage_status()[0].pickable == 1)
        await asyncio.sleep(0.05)
        assert replica.of(wire.Submit) == []


async def test_abort_by_name_ends_the_generator_with_a_summary_that_says_so() -> None:
    replica = FakeReplica(talk)
    async with running_hub(replica) as omni:
        outputs = omni.generate({"prompt": "x"}, request_id="mine")
        await anext(outputs)
        await omni.abort("mine")
        rest = await collect(outputs)
        assert [(output.is_summary, output.finish_reason) for output in rest] == [(True, "abort")]
        await omni.abort("mine")
        await omni.abort("nobody's")


async def test_an_abort_of_several_tells_which_replica_was_silent_and_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. one of two replicas acknowledges nothing: TimeoutError that names its request, though both have ended
    2. the hub fails at an abort: RuntimeError, and the other is aborted
    """
    loud, silent = FakeReplica(talk), FakeReplica(talk, replica_id=1)
    silent.acknowledges_aborts = False
    async with running_hub(loud, silent) as omni:

        async def begin(name: str) -> tuple[FakeReplica, asyncio.Task[Any]]:
            outputs = omni.generate({"prompt": "x"}, request_id=name)
            await anext(outputs)
            told = [each for each in (loud, silent) if any(name in one.request_id for one in each.of(wire.Submit))]
            return told[0], asyncio.create_task(collect(outputs))

        begun = {name: await begin(name) for name in ("a", "b")}
        (late,) = [name for name, (replica, _) in begun.items() if replica is silent]
        with pytest.raises(TimeoutError, match=f"^'{late}': replica 0/1 has not acknowledged the abort within 0.5 s"):
            await omni.abort(["a", "nobody's", "b"])
        for _, reading in begun.values():
            assert [output.finish_reason for output in await reading] == ["abort"]

        begun = {name: await begin(name) for name in ("c", "d")}
        abort_request = Requests.abort_request

        def broken(requests: Requests, abort: AbortRequest) -> None:
            if abort.request_id.startswith("c~"):
                raise ZeroDivisionError
            abort_request(requests, abort)

        monkeypatch.setattr(Requests, "abort_request", broken)
        with pytest.raises(RuntimeError, match=r"^'c': the abort failed: a bug in the hub: ZeroDivisionError"):
            await omni.abort(iter(["c", "d"]))
        assert [output.finish_reason for output in await begun["d"][1]] == ["abort"]
        with pytest.raises(RequestError, match="a bug in the hub"):
            await begun["c"][1]


async def test_a_name_may_be_used_again_at_once_after_an_abort() -> None:
    """The abort's answer from the replica must not be taken for the new request's end."""

    def obey(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        if len(replica.of(wire.Submit)) == 1:
            replica.chunk(submit, 0, text="first")
        else:
            replica.done(replica.of(wire.Submit)[0], 1, finish_reason="abort")
            replica.chunk(submit, 0, text="second")
            replica.done(submit, 1)

    async with running_hub(FakeReplica(obey)) as omni:
        outputs = omni.generate({"prompt": "x"}, request_id="mine")
        await anext(outputs)
        await outputs.aclose()
        assert text_of(await collect(omni.generate({"prompt": "x"}, request_id="mine"))) == "second"


async def test_a_name_in_use_is_refused() -> None:
    async with running_hub(FakeReplica(talk)) as omni:
        outputs = omni.generate({"prompt": "x"}, request_id="mine")
        await anext(outputs)
        with pytest.raises(InvalidRequestError, match="already running"):
            await anext(omni.generate({"prompt": "x"}, request_id="mine"))
        await outputs.aclose()


async def test_a_passed_deadline_ends_the_request_and_stops_the_replica() -> None:
    replica = FakeReplica(talk)
    async with running_hub(replica) as omni:
        begun_s = time.monotonic()
        with pytest.raises(DeadlineExceededError):
            await collect(omni.generate({"prompt": "x"}, timeout_s=0.2))
        assert 0.15 < time.monotonic() - begun_s < soon_s(1.0)
        await until(lambda: bool(replica.of(wire.Abort)))
        assert 0 < replica.of(wire.Submit)[0].remaining_s <= 0.2


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
async def test_a_timeout_that_is_no_length_of_time_is_refused(timeout_s: float) -> None:
    async with running_hub(FakeReplica()) as omni:
        with pytest.raises(InvalidRequestError):
            await collect(omni.generate({"prompt": "x"}, timeout_s=timeout_s))


@pytest.mark.parametrize("inputs", [{"prompt": object()}, {"prompt": 1 << 70}, {"prompt": "x" * (5 << 20)}])
async def test_inputs_that_no_frame_can_hold_fail_that_request_only(inputs: dict[str, object]) -> None:
    """Statement 87."""
    async with running_hub(FakeReplica()) as omni:
        with pytest.raises(InvalidRequestError):
            await collect(omni.generate(inputs))
        assert text_of(await collect(omni.generate({"prompt": "next"}))) == "next "


async def test_more_requests_than_the_bound_are_refused_with_a_time_to_come_back() -> None:
    async with running_hub(FakeReplica(talk), config=replace(QUICK, max_in_flight=2)) as omni:
        running = [omni.generate({"prompt": "x"}) for _ in range(2)]
        for outputs in running:
            await anext(outputs)
        with pytest.raises(OverloadedError) as caught:
            await anext(omni.generate({"prompt": "x"}))
        assert caught.value.retry_after_s
        for outputs in running:
            await outputs.aclose()
        assert (await anext(omni.generate({"prompt": "x"}))).text == "word "


async def test_text_for_a_slow_reader_is_joined() -> None:
    async with running_hub(FakeReplica(echo), config=replace(QUICK, max_queued_outputs=3)) as omni:
        outputs = omni.generate({"prompt": "a b c d e f g h"})
        first = await anext(outputs)
        await asyncio.sleep(0.1)
        rest = await collect(outputs)
        assert text_of([first, *rest]) == "a b c d e f g h "
        assert len(rest) <= 3


async def test_a_reader_that_lets_too_much_pile_up_loses_its_request_only() -> None:
    def paint_many(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        for seq in range(4):
            replica.chunk(submit, seq, modality="image", mime="image/png", attachments=[b"x" * 1000])

    replica = FakeReplica(paint_many)
    async with running_hub(replica, config=replace(QUICK, max_queued_bytes=2500)) as omni:
        outputs = omni.generate({"prompt": "x"})
        await anext(outputs)
        await asyncio.sleep(0.1)
        with pytest.raises(OverloadedError, match="too slowly"):
            await collect(outputs)
        await until(lambda: bool(replica.of(wire.Abort)))
        await omni.check_health()


async def test_closing_the_hub_ends_every_request_and_tells_the_replicas() -> None:
    replica = FakeReplica(talk)
    async with running_hub(replica) as omni:
        outputs = omni.generate({"prompt": "x"})
        await anext(outputs)
        assert omni.is_running
        await omni.close()
        with pytest.raises(StageUnavailableError, match="stopping"):
            await anext(outputs)
        assert not omni.is_running
        with pytest.raises(RequestError):
            await omni.check_health()
        with pytest.raises(RequestError):
            await anext(omni.generate({"prompt": "x"}))
        await omni.close()
        await until(lambda: bool(replica.of(wire.Abort)))


async def test_a_balancer_with_a_bug_costs_one_request_and_not_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def boom(_self: object, _task: object) -> None:
        raise ZeroDivisionError

    async with running_hub(FakeReplica()) as omni:
        with monkeypatch.context() as patched:
            patched.setattr("omni_discovery.balancing.weighted.StrideIndex.pick", boom)
            with pytest.raises(RequestError, match="ZeroDivisionError"):
                await collect(omni.generate({"prompt": "x"}))
        assert text_of(await collect(omni.generate({"prompt": "next"}))) == "next "


async def test_generators_end_even_if_the_orchestrators_task_dies() -> None:
    async with running_hub(FakeReplica(talk)) as omni:
        outputs = omni.generate({"prompt": "x"})
        await anext(outputs)
        omni._tasks[0].cancel()
        with pytest.raises(StageUnavailableError):
            await anext(outputs)
        assert not omni.is_running
        # Whoever shares requests out among hubs must not go on sending them here.
        assert ready_response(omni).status_code == 503


async def test_a_hub_that_never_started_refuses_and_closes() -> None:
    omni = AsyncOmni(deploy_of(ONE_STAGE), "hub-1", KeyPair.generate(), QUICK, "random")
    with pytest.raises(RequestError, match="not running"):
        await anext(omni.generate({"prompt": "x"}))
    await omni.close()


async def test_the_figures_tell_what_happened() -> None:
    async with running_hub(FakeReplica(echo)) as omni:
        (*_, last) = await collect(omni.generate({"prompt": "x"}))
        with pytest.raises(InvalidRequestError):
            await collect(omni.generate({"prompt": object()}))
        value = omni.metrics.get_sample_value
        assert value("omni_hub_requests_total", {"outcome": "ok"}) == 1.0
        assert value("omni_hub_requests_total", {"outcome": "InvalidRequestError"}) == 1.0
        assert value("omni_hub_requests_in_flight") == 0.0
        assert value("omni_hub_replicas_pickable", {"stage": "0"}) == 1.0
        assert value("omni_hub_overhead_seconds_count", {"way": "in"}) == 1.0
        assert last.timings_s["total"] > 0
