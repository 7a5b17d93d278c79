"""Who is left out for failures, and who is not: requests that fail everywhere eject no replica that is well."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import replace

import pytest

from hub.async_omni import AsyncOmni
from omni_discovery import wire
from omni_discovery.curve import KeyPair
from omni_discovery.errors import EngineFailedError
from tests.support.hub_fakes import (
    ONE_STAGE,
    QUICK,
    FakeReplica,
    Script,
    ask,
    collect,
    deploy_of,
    echo,
    running_hub,
    silence,
    started_hub,
    until,
)
from tests.support.local_replica import LocalReplica

BAD = {"prompt": "FAIL"}


def ejected(omni: AsyncOmni) -> float | None:
    return omni.metrics.get_sample_value("omni_hub_replicas_ejected", {"stage": "0"})


def fail_bad(replica: FakeReplica, submit: wire.Submit) -> None:
    """Echo, but fail what is bad, in the engine."""
    if submit.inputs["prompt"] == BAD["prompt"]:
        replica.accept(submit)
        replica.fail(submit)
    else:
        echo(replica, submit)


def fail_all(replica: FakeReplica, submit: wire.Submit) -> None:
    replica.accept(submit)
    replica.fail(submit)


def say_done_with_a_gap(replica: FakeReplica, submit: wire.Submit) -> None:
    """End at once, with a number that says that pieces came before."""
    replica.accept(submit)
    replica.done(submit, 7)


def give_up(replica: FakeReplica, submit: wire.Submit) -> None:
    """Stop the work, though nobody has asked for it."""
    replica.accept(submit)
    replica.done(submit, 0, finish_reason="abort")


@pytest.mark.attack("E9")
@pytest.mark.parametrize("script", [say_done_with_a_gap, give_up])
async def test_a_replica_whose_answers_are_not_whole_is_left_out(
    script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    """Each request that meets it is served by the other; it is ejected as one whose engine fails."""
    replicas = [FakeReplica(script, replica_id=0), FakeReplica(echo, replica_id=1)]
    async with running_hub(*replicas) as omni:
        for _ in range(20):
            assert (await ask(omni, "well")).strip() == "well"
            if ejected(omni) == 1:
                break
        assert ejected(omni) == 1
    assert "replica.ejected replica=0/0" in caplog.text
    assert "its output is not whole" in caplog.text


@pytest.mark.attack("G4")
async def test_a_replica_that_is_only_late_is_not_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """1. one replica accepts nothing for a second each time, as if a prompt of megabytes kept it busy
    2. what waits there goes to the other one, and the late one is asked on
    """

    def late(replica: FakeReplica, submit: wire.Submit) -> None:
        asyncio.get_running_loop().call_later(1.0, echo, replica, submit)

    busy, well = FakeReplica(late), FakeReplica(echo, replica_id=1)
    config = replace(QUICK, accept_timeout_s=0.1, accept_limit_s=30.0, request_timeout_s=60.0)
    async with running_hub(busy, well, config=config) as omni:
        for _ in range(20):
            assert await ask(omni, "well") == "well "
            assert ejected(omni) == 0
        assert len(busy.of(wire.Submit)) >= 4
        assert len(well.of(wire.Submit)) == 20
    assert "replica.ejected" not in caplog.text


async def test_a_replica_that_answers_no_dispatch_at_all_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Its session lives, and each of its requests moves on long before its own limit."""
    silent, well = FakeReplica(silence), FakeReplica(echo, replica_id=1)
    config = replace(QUICK, accept_timeout_s=0.05, accept_limit_s=0.5, request_timeout_s=60.0)
    async with running_hub(silent, well, config=config) as omni, asyncio.timeout(30.0):
        while not ejected(omni):
            assert await ask(omni, "well") == "well "
    assert "replica.ejected replica=0/0" in caplog.text
    assert "the last: it answered no dispatch for 0.5 s" in caplog.text


async def fail(omni: AsyncOmni) -> None:
    with pytest.raises(EngineFailedError):
        await collect(omni.generate(BAD))


@pytest.mark.attack("A14")
async def test_requests_that_fail_at_each_replica_leave_none_out(keys: KeyPair, stack: ExitStack) -> None:
    """1. two real replicas; three requests that the engine fails, then one beside each good one
    2. the good ones go to both replicas all the time
    """
    made = [
        stack.enter_context(
            LocalReplica({keys.public: "hub-1"}, replica_id=number, epoch=70 + number, fail_on=BAD["prompt"])
        )
        for number in range(2)
    ]
    omni = AsyncOmni(deploy_of(ONE_STAGE), "hub-1", keys, QUICK, "least-load")
    async with started_hub(omni, *(replica.info for replica in made)):
        for _ in range(3):
            await fail(omni)
        for _ in range(20):
            assert ejected(omni) == 0
            await asyncio.gather(fail(omni), ask(omni, "well"), ask(omni, "well"))
    served = [sum(request.inputs["prompt"] == "well" for request in replica.engine.requests) for replica in made]
    assert sum(served) == 40
    assert min(served) >= 10


@pytest.mark.attack("A14")
async def test_a_burst_of_bad_requests_leaves_none_out(keys: KeyPair) -> None:
    """Twenty at once, more than may be tried again at once: the retry budget is used up, and retries wait for it."""
    replicas = [FakeReplica(fail_bad, replica_id=number) for number in range(2)]
    async with running_hub(*replicas, policy="least-load") as omni:
        await asyncio.gather(*(fail(omni) for _ in range(20)))
        await until(lambda: ejected(omni) == 0)
        for replica in replicas:
            replica.received.clear()
        assert [await ask(omni, "well") for _ in range(10)] == ["well "] * 10
    assert all(replica.of(wire.Submit) for replica in replicas)


async def test_a_broken_replica_is_left_out_also_while_bad_requests_come() -> None:
    """1. one of three fails everything, beside requests that fail anywhere; 2. it gets no more but a probe"""
    broken = FakeReplica(fail_all)
    well = [FakeReplica(fail_bad, replica_id=number) for number in (1, 2)]
    async with running_hub(broken, *well) as omni:
        for _ in range(12):
            await asyncio.gather(fail(omni), *(ask(omni, "well") for _ in range(4)))
            if ejected(omni):
                break
        assert ejected(omni) == 1
        broken.received.clear()
        assert [await ask(omni, "well") for _ in range(6)] == ["well "] * 6
    assert len(broken.of(wire.Submit)) <= 1


async def test_two_broken_replicas_of_three_are_to_blame_for_what_the_third_serves() -> None:
    """Where a request failed at both of them, it was excused, until the third one had served it."""
    broken = [FakeReplica(fail_all, replica_id=number) for number in range(2)]
    well = FakeReplica(echo, replica_id=2)
    async with running_hub(*broken, well) as omni:
        for _ in range(60):
            assert await ask(omni, "well") == "well "
            if ejected(omni):
                break
        assert ejected(omni) == 1
