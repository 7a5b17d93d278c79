"""Requests whose replica died before any output of them came: where they go, and when."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from omni_discovery import wire
from omni_discovery.errors import PoisonousRequestError, ReplicaLostError
from omni_discovery.records.schema import ReplicaStatus
from tests.support.hub_fakes import (
    QUICK,
    FakeReplica,
    accept_only,
    ask,
    collect,
    echo,
    running_hub,
    show,
    text_of,
    until,
    with_status,
)

#: Longer than a test lasts: what waits for it does not end.
PATIENT = replace(QUICK, pick_timeout_s=120.0, request_timeout_s=600.0)


def die(replica: FakeReplica, submit: wire.Submit) -> None:
    """Take the work, then go the way a killed process goes."""
    replica.accept(submit)
    replica.kill_soon()


def speak(replica: FakeReplica, submit: wire.Submit) -> None:
    """Put out a word with its token id, and no more."""
    replica.accept(submit)
    about = {"epoch": submit.epoch, "request_id": submit.request_id, "attempt": submit.attempt, "queue_length": 0}
    replica.say(wire.Chunk(**about, seq=0, modality="text", text="one ", token_ids=(1,)))


async def test_none_of_twenty_silent_requests_of_a_killed_replica_is_lost_though_only_one_is_left() -> None:
    """1. a has taken twenty requests and is killed; no other is being started
    2. after the pick timeout b gets them, one after the other, each once the one before has put something out
    """
    a, b = FakeReplica(accept_only), FakeReplica(echo, replica_id=1)
    try:
        async with running_hub(a) as omni:
            answers = [asyncio.ensure_future(ask(omni, f"n{number}")) for number in range(20)]
            await until(lambda: len(a.of(wire.Submit)) == 20)
            show(omni, a.info, b.info)
            await until(lambda: omni.stage_status()[0].pickable == 2)
            a.kill()
            assert await asyncio.gather(*answers) == [f"n{number} " for number in range(20)]
            assert len(b.of(wire.Submit)) == 20
    finally:
        b.kill()


async def test_an_answer_that_was_being_put_out_goes_on_at_once_on_the_last_replica() -> None:
    a, b = FakeReplica(speak), FakeReplica(echo, replica_id=1)
    try:
        async with running_hub(a, config=PATIENT) as omni:
            outputs = omni.generate({"prompt": "two"})
            assert (await anext(outputs)).text == "one "
            show(omni, a.info, b.info)
            await until(lambda: omni.stage_status()[0].pickable == 2)
            a.kill()
            assert text_of(await collect(outputs)) == "two "
    finally:
        b.kill()


async def test_a_silent_request_spares_the_last_replica_until_another_is_up() -> None:
    """1. a is killed with a silent request: b, the last one, does not get it, though it serves others
    2. c is being started, then up: one of the two gets it
    """
    a, b, c = FakeReplica(accept_only), FakeReplica(echo, replica_id=1), FakeReplica(echo, replica_id=2)
    try:
        async with running_hub(a, config=PATIENT) as omni:
            answer = asyncio.ensure_future(ask(omni, "patience"))
            await until(lambda: len(a.of(wire.Submit)) == 1)
            show(omni, a.info, b.info)
            await until(lambda: omni.stage_status()[0].pickable == 2)
            a.kill()
            await until(lambda: omni.stage_status()[0].pickable == 1)
            for _ in range(3):
                assert await ask(omni) == "hello there "
            show(omni, b.info, with_status(c.info, ReplicaStatus.STARTING))
            await asyncio.sleep(0.3)
            assert not answer.done()
            assert len(b.of(wire.Submit)) == 3
            show(omni, b.info, c.info)
            assert await answer == "patience "
    finally:
        b.kill()
        c.kill()


async def test_with_the_culprit_found_those_that_were_with_it_go_on_at_once_on_the_last_replica() -> None:
    """1. a has three silent requests and dies of the culprit; b and c are left
    2. the culprit was sent last and is tried first: it kills one of them
    3. the three go on at once on the last one, which does not get the culprit
    """

    def echo_or_die(replica: FakeReplica, submit: wire.Submit) -> None:
        if submit.inputs["prompt"] == "culprit":
            die(replica, submit)
        elif replica is a:
            replica.accept(submit)
        else:
            echo(replica, submit)

    a, b, c = (FakeReplica(echo_or_die, replica_id=number) for number in range(3))
    try:
        async with running_hub(a, config=PATIENT) as omni:
            answers = [asyncio.ensure_future(ask(omni, f"n{number}")) for number in range(3)]
            await until(lambda: len(a.of(wire.Submit)) == 3)
            culprit = asyncio.ensure_future(ask(omni, "culprit"))
            await until(lambda: len(a.of(wire.Submit)) == 4)
            show(omni, a.info, b.info, c.info)
            with pytest.raises(PoisonousRequestError, match=r"lost with it: 0/0, 0/[12]\)"):
                await culprit
            assert await asyncio.gather(*answers) == [f"n{number} " for number in range(3)]
            tried = [submit.inputs["prompt"] for replica in (b, c) for submit in replica.of(wire.Submit)]
            assert sorted(tried) == ["culprit", "n0", "n1", "n2"]
    finally:
        b.kill()
        c.kill()


async def test_a_request_that_kills_before_its_word_of_acceptance_leaves_takes_two_replicas() -> None:
    """1. the culprit is sent to a, b or c, which is gone before it has said anything
    2. it is tried at one more, and then no more: the third one serves on
    """

    def echo_or_vanish(replica: FakeReplica, submit: wire.Submit) -> None:
        if submit.inputs["prompt"] == "culprit":
            replica.kill_soon(0.0)
        else:
            echo(replica, submit)

    replicas = [FakeReplica(echo_or_vanish, replica_id=number) for number in range(3)]
    config = replace(PATIENT, accept_timeout_s=60.0, accept_limit_s=90.0)
    async with running_hub(*replicas, config=config) as omni:
        with pytest.raises(PoisonousRequestError, match=r"lost with it: 0/\d, 0/\d\)"):
            await ask(omni, "culprit")
        assert await ask(omni) == "hello there "
        assert sum(len(replica.of(wire.Submit)) for replica in replicas) == 3


async def test_a_long_row_of_suspects_is_passed_together_while_one_replica_stays_free_of_them() -> None:
    """1. a is killed with fifteen silent requests; b and c are left
    2. none of them puts anything out before all are there: they come to one of the two, beside each other
    """
    held: list[tuple[FakeReplica, wire.Submit]] = []

    def hold(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        held.append((replica, submit))

    a, b, c = FakeReplica(accept_only), FakeReplica(hold, replica_id=1), FakeReplica(hold, replica_id=2)
    try:
        async with running_hub(a, config=PATIENT) as omni:
            answers = [asyncio.ensure_future(ask(omni, f"n{number}")) for number in range(15)]
            await until(lambda: len(a.of(wire.Submit)) == 15)
            show(omni, a.info, b.info, c.info)
            await until(lambda: omni.stage_status()[0].pickable == 3)
            a.kill()
            await until(lambda: len(held) == 15, 30.0)
            assert len({replica.name for replica, _ in held}) == 1
            for replica, submit in held:
                echo(replica, submit)
            assert await asyncio.gather(*answers) == [f"n{number} " for number in range(15)]
    finally:
        b.kill()
        c.kill()


async def test_an_engine_that_dies_makes_suspects_of_what_ran_there_and_is_picked_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """1. a says of two silent requests that its engine died, and its process lives on for a while
    2. b, the last one, gets neither of them, though it serves others; the log names both, in one line
    3. with c up, they go on
    """

    def engine_died(replica: FakeReplica) -> None:
        for submit in replica.of(wire.Submit):
            about = {"epoch": submit.epoch, "request_id": submit.request_id, "attempt": submit.attempt}
            cause = wire.FailureKind.ENGINE
            replica.say(wire.StageFailed(**about, queue_length=0, kind=cause, reason="the engine died: it crashed"))

    a, b, c = FakeReplica(accept_only), FakeReplica(echo, replica_id=1), FakeReplica(echo, replica_id=2)
    try:
        async with running_hub(a, config=PATIENT) as omni:
            answers = [asyncio.ensure_future(ask(omni, name)) for name in ("x", "y")]
            await until(lambda: len(a.of(wire.Submit)) == 2)
            show(omni, a.info, b.info)
            await until(lambda: omni.stage_status()[0].pickable == 2)
            engine_died(a)
            await until(lambda: omni.stage_status()[0].pickable == 1)
            for _ in range(3):
                assert await ask(omni) == "hello there "
            a.kill()
            await asyncio.sleep(0.3)
            assert not any(answer.done() for answer in answers)
            (told,) = [line for line in caplog.messages if line.startswith("replica.lost_at_work")]
            assert "replica=0/0 in_flight=2 requests=" in told
            show(omni, b.info, c.info)
            assert await asyncio.gather(*answers) == ["x ", "y "]
            assert len([line for line in caplog.messages if line.startswith("replica.lost_at_work")]) == 1
    finally:
        b.kill()
        c.kill()


async def test_the_requests_of_a_lost_replica_are_logged_once_also_where_they_wait_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """1. the only replica is killed with a request that may not be tried again: it waits for the session
    2. its process is then seen to be gone
    """
    a = FakeReplica(accept_only)
    async with running_hub(a, config=replace(PATIENT, attempts=1)) as omni:
        answer = asyncio.ensure_future(ask(omni))
        await until(lambda: len(a.of(wire.Submit)) == 1)
        a.kill()
        with pytest.raises(ReplicaLostError):
            await answer
        assert len([line for line in caplog.messages if line.startswith("replica.lost_at_work")]) == 1
