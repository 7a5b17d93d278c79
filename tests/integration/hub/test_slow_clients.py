"""A client that does not read: the stage that works for it stops, nobody else notices, and not a word is lost."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import replace
from time import monotonic

import pytest

from hub.async_omni import AsyncOmni
from hub.output_queue import OutputQueue
from omni_discovery import wire
from omni_discovery.errors import DeadlineExceededError, OverloadedError
from stage_runtime.config import ServerConfig
from tests.support.child_replica import ChildReplica
from tests.support.hub_fakes import QUICK, FakeReplica, collect, deploy_of, running_hub, show, text_of, until
from tests.support.local_replica import LocalReplica
from tests.support.serving import HUBS, hub_of

ONE = "stages: [{stage_id: 0, engine: echo, final_output: text}]"
PIECES = "async_chunk: true\nstages: [{stage_id: 0, engine: echo}, {stage_id: 1, engine: echo, final_output: text}]"
CONFIG = replace(QUICK, request_timeout_s=60.0, max_queued_outputs=16, accept_timeout_s=2.0, accept_limit_s=10.0)
WORDS, DELAY_S = 2000, 0.0005
TEXT = " ".join(f"w{number}" for number in range(WORDS))


def said(replica: LocalReplica) -> int:
    """How many words the engine has said of the one request that it has."""
    (speech,) = replica.engine._speeches.values()
    return len(speech.said)


def stands_still(replica: LocalReplica) -> bool:
    """Whether the engine keeps a request, and has nothing to do."""
    return len(replica.loop) == 1 and not replica.engine.has_unfinished()


def queue_of(omni: AsyncOmni) -> OutputQueue:
    (queue,) = omni._queues.values()
    return queue


async def test_the_engine_stops_for_a_client_that_does_not_read_and_serves_the_others() -> None:
    """1. a client takes the first word of two thousand: the engine stands still soon after, and is no stall
    2. another client of the same replica is served again and again, and what waits for the first grows no more
    3. it reads: the engine goes on, and it gets every word, once and in order
    """
    with LocalReplica(HUBS, capacity=2, delay_s=DELAY_S) as replica:
        async with hub_of(ONE, replica, config=CONFIG) as omni:
            slow = omni.generate({"prompt": TEXT})
            first = await anext(slow)
            await until(lambda: stands_still(replica), 20.0)
            words, queue = said(replica), queue_of(omni)
            assert words < WORDS
            for number in range(20):
                assert text_of(await collect(omni.generate({"prompt": f"other {number}"}))) == f"other {number}"
            await until(lambda: stands_still(replica) and not replica.loop.progress.busy, 5.0)
            assert said(replica) == words
            assert omni.metrics.get_sample_value("omni_hub_clients_behind") == 1.0
            assert len(queue._outputs) <= CONFIG.max_queued_outputs
            assert queue._size_bytes < len(TEXT) / 2
            assert text_of([first, *await collect(slow)]) == TEXT
            assert len(replica.engine.begun) == 21
            assert omni.metrics.get_sample_value("omni_hub_clients_behind") == 0.0


async def test_a_client_that_leaves_while_nothing_is_made_for_it_frees_its_place() -> None:
    with LocalReplica(HUBS, delay_s=DELAY_S) as replica:
        async with hub_of(ONE, replica, config=CONFIG) as omni:
            slow = omni.generate({"prompt": TEXT})
            await anext(slow)
            await until(lambda: stands_still(replica), 20.0)
            await slow.aclose()
            await until(lambda: replica.server.queue_length == 0 and len(replica.loop) == 0, 5.0)
            assert not replica.engine._speeches


async def test_work_that_waits_for_its_client_and_can_not_move_outlives_a_lost_session() -> None:
    """1. nobody could go on behind what a replica has said, and it is to pause; its connection is lost and comes back
    2. it is told again, says that it has the work, and is not given up for having nothing more to say
    3. the client reads, and it goes on
    """
    submits: list[wire.Submit] = []

    def talk(replica: FakeReplica, submit: wire.Submit) -> None:
        submits.append(submit)
        replica.accept(submit)
        for seq in range(10):
            replica.chunk(submit, seq, text=f"w{seq} ")

    replica = FakeReplica(talk)
    async with running_hub(replica, config=replace(CONFIG, silence_grace_s=1.0)) as omni:
        slow = omni.generate({"prompt": "x"})
        first = await anext(slow)
        await until(lambda: len(replica.of(wire.Pause)) == 1)
        (client,) = omni._running_orchestrator()._membership.clients.values()
        client.connection_lost("input")
        client.connection_made("input")
        await until(lambda: len(replica.of(wire.Pause)) == 2)
        replica.accept(submits[0])
        await asyncio.sleep(1.3)
        reading = asyncio.create_task(collect(slow))
        await until(lambda: len(replica.of(wire.Pause)) == 3)
        replica.chunk(submits[0], 10, text="w10")
        replica.done(submits[0], 11)
        assert text_of([first, *await reading]) == " ".join(f"w{number}" for number in range(11))
        assert [pause.paused for pause in replica.of(wire.Pause)] == [True, True, False]
        assert len(submits) == 1


async def test_the_deadline_of_a_client_that_does_not_read_holds() -> None:
    """The whole text would take a second, its time is two: nothing is made while nobody reads, and then it is over."""
    with LocalReplica(HUBS, delay_s=DELAY_S) as replica:
        async with hub_of(ONE, replica, config=CONFIG) as omni:
            slow = omni.generate({"prompt": TEXT}, timeout_s=2.0)
            await anext(slow)
            await until(lambda: len(replica.loop) == 0, 20.0)
            with pytest.raises(DeadlineExceededError):
                await collect(slow)


async def test_another_replica_that_goes_on_for_a_client_that_does_not_read_stands_still_too() -> None:
    """1. the replica of a client that does not read is killed
    2. another one goes on where it was, and is told to pause as well
    3. the client reads: every word, once and in order, from both
    """
    with ExitStack() as stack:
        doomed = stack.enter_context(ChildReplica(HUBS, delay_s=DELAY_S))
        second = stack.enter_context(LocalReplica(HUBS, replica_id=1, epoch=71, delay_s=DELAY_S))
        async with hub_of(ONE, doomed, config=CONFIG) as omni:
            slow = omni.generate({"prompt": TEXT})
            outputs = [await anext(slow)]
            (active,) = omni._running_orchestrator()._requests.active.values()
            await until(lambda: active.machine.runs[0].pause_sent is True, 20.0)
            show(omni, doomed.info, second.info)
            await until(lambda: omni.stage_status()[0].pickable == 2, 20.0)
            doomed.kill()
            await until(lambda: stands_still(second), 20.0)
            assert 0 < said(second) < WORDS
            outputs += await collect(slow)
            assert text_of(outputs) == TEXT
            assert {output.replica for output in outputs if output.text} == {"0/0", "0/1"}


async def test_a_client_that_does_not_read_gives_its_slot_to_others() -> None:
    """1. a replica has one slot; its client takes the first word of two thousand, and no more
    2. another client is served in that slot again and again
    3. a second one takes its time, too, and both wait there; the replica has its one slot to lend, no more
    4. both read: each gets every word, once and in order, and the slot is free again
    """
    with LocalReplica(HUBS, capacity=1, delay_s=DELAY_S) as replica:
        async with hub_of(ONE, replica, config=CONFIG) as omni:
            book = replica.server._sessions._credits
            slow = omni.generate({"prompt": TEXT})
            outputs = [await anext(slow)]
            await until(lambda: stands_still(replica), 20.0)
            for number in range(5):
                assert text_of(await collect(omni.generate({"prompt": f"other {number}"}))) == f"other {number}"
            late = omni.generate({"prompt": TEXT})
            more = [await anext(late)]
            await until(lambda: len(replica.loop) == 2 and not replica.engine.has_unfinished(), 20.0)
            await until(lambda: book.free + book.unspent == 1)
            rest, others = await asyncio.gather(collect(slow), collect(late))
            assert text_of([*outputs, *rest]) == text_of([*more, *others]) == TEXT
            await until(lambda: book.free + book.unspent == 1)


@pytest.mark.attack("I2")
async def test_a_client_that_does_not_read_keeps_no_slot_of_a_stage_that_feeds_the_last_by_pieces() -> None:
    """1. stage 0 has one slot and feeds stage 1 piece by piece; a client takes the first word of two thousand
    2. both stages stand still; another client is served in the slot of stage 0 again and again
    3. the first reads: every word, once and in order, and the slot is free again
    """
    with ExitStack() as stack:
        first = stack.enter_context(LocalReplica(HUBS, capacity=1, delay_s=DELAY_S, deploy=deploy_of(PIECES)))
        second = stack.enter_context(
            LocalReplica(HUBS, stage_id=1, epoch=71, capacity=8, delay_s=DELAY_S, deploy=deploy_of(PIECES))
        )
        async with hub_of(PIECES, first, second, config=CONFIG) as omni:
            book = first.server._sessions._credits
            slow = omni.generate({"prompt": TEXT})
            outputs = [await anext(slow)]
            await until(lambda: stands_still(first) and stands_still(second), 30.0)
            for number in range(5):
                assert text_of(await collect(omni.generate({"prompt": f"other {number}"}))) == f"other {number}"
            assert text_of([*outputs, *await collect(slow)]) == TEXT
            await until(lambda: book.free + book.unspent == 1, 30.0)


@pytest.mark.attack("I5")
async def test_clients_that_do_not_read_fill_neither_a_replica_nor_its_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. a replica with one slot where one may wait, a hub for four requests: four clients take a word and no more
    2. others are served all the while; for the first that comes, the hub ends the one that is furthest behind
    3. that one gets an error that says why; the others read on, every word
    """
    monkeypatch.setattr("hub.async_omni._PATIENCE_S", 0.2)
    small = ServerConfig(max_waiting=1)
    with LocalReplica(HUBS, capacity=1, delay_s=DELAY_S, config=small) as replica:
        async with hub_of(ONE, replica, config=replace(CONFIG, max_in_flight=4, max_waiting=1)) as omni:
            slow = []
            for number in range(4):
                slow.append(omni.generate({"prompt": TEXT}))
                await anext(slow[-1])
                await until(lambda n=number: replica.server._sessions.ledger.parked_count == n + 1, 30.0)
            for number in range(2):
                await until(lambda: min(each.unread_since_s for each in omni._queues.values()) < monotonic() - 0.2)
                assert text_of(await collect(omni.generate({"prompt": f"other {number}"}))) == f"other {number}"
            with pytest.raises(OverloadedError, match="reads too slowly"):
                await collect(slow[0])
            for each in slow[1:]:
                assert text_of(await collect(each)).endswith(f"w{WORDS - 1}")
            await until(lambda: replica.server.queue_length == 0 and not omni._queues, 30.0)


async def test_who_is_refused_for_another_reason_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. a full hub, whose only client does not read; 2. what would wait beyond its time is refused
    3. the one that does not read still gets every word
    """
    monkeypatch.setattr("hub.async_omni._PATIENCE_S", 0.0)
    with LocalReplica(HUBS, capacity=1, delay_s=DELAY_S) as replica:
        async with hub_of(ONE, replica, config=replace(CONFIG, max_in_flight=1)) as omni:
            slow = omni.generate({"prompt": TEXT})
            first = await anext(slow)
            await until(lambda: queue_of(omni).unread_since_s < monotonic(), 20.0)

            def refuse(*_: object) -> None:
                raise OverloadedError("stage 0 would begin too late", 1.0, 0)

            with monkeypatch.context() as patch:
                patch.setattr(omni._admission, "admit", refuse)
                with pytest.raises(OverloadedError, match="too late"):
                    await collect(omni.generate({"prompt": "other"}))
            assert text_of([first, *await collect(slow)]) == TEXT
