"""Several hubs share the slots of real replicas by credits, without anybody between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from hub.async_omni import AsyncOmni
from hub.config import HubConfig
from omni_discovery import wire
from omni_discovery.curve import KeyPair
from omni_discovery.records.schema import HubRecord
from omni_discovery.view.table import Delta, View
from stage_runtime.server.credits import CreditBook
from tests.support.hub_fakes import ONE_STAGE, collect, deploy_of, text_of, until
from tests.support.local_replica import LocalReplica
from tests.support.quiet import soon_s

CONFIG = replace(HubConfig(), hello_interval_s=0.02, reconnect_min_s=0.02, reconnect_max_s=0.1)
NAMES = ("hub-1", "hub-2", "hub-3")


@asynccontextmanager
async def sharing(
    replicas: Sequence[LocalReplica],
    count: int,
    labels: Mapping[str, str] | None = None,
    others: Mapping[str, str] | None = None,
) -> AsyncIterator[list[AsyncOmni]]:
    """So many hubs that all see these replicas, whose doors are open to them, and to ``others``: key by hub id."""
    pairs = {name: KeyPair.generate() for name in NAMES[:count]}
    hubs = {name: HubRecord(hub_id=name, curve_public_key=pair.public) for name, pair in pairs.items()}
    view = View(replicas={(0, each.info.replica_id): each.info for each in replicas}, hubs=hubs, revision=5)
    async with AsyncExitStack() as stack:
        omnis: list[AsyncOmni] = []
        for each in replicas:
            each.server.set_allowed_hubs({name: pair.public for name, pair in pairs.items()} | dict(others or {}))
            stack.enter_context(each)
        for name, pair in pairs.items():
            omni = AsyncOmni(deploy_of(ONE_STAGE), name, pair, CONFIG, labels=labels)
            await omni.start()
            stack.push_async_callback(omni.close)
            omni.apply_view(view, Delta())
            omnis.append(omni)
        for omni in omnis:
            await until(lambda omni=omni: omni.stage_status()[0].pickable == len(replicas))  # type: ignore[misc]
        yield omnis


class Watch:
    """Looks at the replicas' queues all the time."""

    def __init__(self, replicas: Sequence[LocalReplica]) -> None:
        self.most = 0
        self._replicas = replicas
        self._task = asyncio.create_task(self._look())

    async def _look(self) -> None:
        while True:
            self.most = max(self.most, *(each.server.queue_length for each in self._replicas))
            await asyncio.sleep(0.001)

    async def end(self) -> int:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        return self.most


async def ask(omni: AsyncOmni, text: str, priority: int = 0) -> str:
    return text_of(await collect(omni.generate({"prompt": text}, priority=priority)))


def held(omni: AsyncOmni, addr: str) -> int:
    """The unspent credits that a hub has of a replica."""
    assert omni._orchestrator is not None
    return omni._orchestrator.stage_pools[0].core.members.credits(addr)


@pytest.mark.parametrize("hubs", [1, 3])
async def test_no_replica_ever_holds_more_than_it_can_run(hubs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. two replicas of two slots each, 60 requests of 20 ms at once over one hub, or over three
    2. all come through, and no replica ever had a third one
    3. in the end the hubs hold every slot as a credit: none was lost on the way
    """
    # A hub that is slow to answer a recall has lost the credits, and what it sends on them is one too many.
    monkeypatch.setattr(CreditBook.__init__, "__defaults__", (30.0,))
    replicas = [LocalReplica(replica_id=number, capacity=2, delay_s=0.02) for number in range(2)]
    async with sharing(replicas, hubs) as omnis:
        watch = Watch(replicas)
        answers = await asyncio.gather(*(ask(omnis[number % hubs], f"word{number}") for number in range(60)))
        assert answers == [f"word{number}" for number in range(60)]
        assert await watch.end() == 2
        for each in replicas:
            await until(lambda addr=each.info.input_addr: sum(held(omni, addr) for omni in omnis) == 2)  # type: ignore[misc]
        assert all(each.server.counters["rejected_overloaded"] == 0 for each in replicas)


async def begun_at_once(replicas: Sequence[LocalReplica], omni: AsyncOmni, count: int) -> list[int]:
    """How many of so many requests, all sent at once, each replica got."""
    before = [len(each.engine.begun) for each in replicas]
    await asyncio.gather(*(ask(omni, f"a{number} b c d") for number in range(count)))
    return [len(each.engine.begun) - was for each, was in zip(replicas, before, strict=True)]


async def test_idle_hubs_drive_no_request_out_of_its_zone() -> None:
    """1. two replicas of four slots in two zones, three hubs that share them alike; two of the hubs are idle
    2. the third, in zone a, sends four requests at once, several times: all run in zone a
    """
    replicas = [LocalReplica(replica_id=number, capacity=4, delay_s=0.05) for number in range(2)]
    for each, zone in zip(replicas, "ba", strict=True):
        each.info = replace(each.info, labels={"zone": zone})
    async with sharing(replicas, 3, labels={"zone": "a"}) as (_, omni, _):
        assert [await begun_at_once(replicas, omni, 4) for _ in range(5)] == [[0, 4]] * 5
        assert await begun_at_once(replicas, omni, 8) == [4, 4], "a full zone is left"


async def test_idle_hubs_take_nothing_of_a_heavier_replicas_share() -> None:
    replicas = [LocalReplica(replica_id=number, capacity=4, delay_s=0.05) for number in range(2)]
    for each, weight in zip(replicas, (2.0, 0.25), strict=True):
        each.info = replace(each.info, weight=weight)
    async with sharing(replicas, 3) as (omni, _, _):
        found = [await begun_at_once(replicas, omni, 5) for _ in range(5)]
        assert sum(heavy for heavy, _ in found) >= 19, found


async def test_a_hub_that_needs_a_slot_gets_one_that_another_only_holds() -> None:
    """One replica, one slot, three hubs in turn: the credit goes to whoever has a request."""
    with_one_slot = [LocalReplica(capacity=1)]
    async with sharing(with_one_slot, 3) as omnis:
        for round_ in range(10):
            omni = omnis[round_ % 3]
            async with asyncio.timeout(soon_s(1.0)):
                assert await ask(omni, f"round{round_}") == f"round{round_}"


async def test_the_slots_of_a_hub_that_dies_come_back() -> None:
    """1. the first hub holds all the work and every slot
    2. it is gone without a word
    3. the second hub's requests run, long before any lease would have ended
    """
    replicas = [LocalReplica(capacity=2, delay_s=0.05)]
    async with sharing(replicas, 2) as (first, second):
        running = [asyncio.create_task(ask(first, "a b c d e f g h " * 40)) for _ in range(2)]
        await until(lambda: replicas[0].server.queue_length == 2)
        await first.close()
        await asyncio.gather(*running, return_exceptions=True)
        async with asyncio.timeout(5.0):
            assert await ask(second, "mine") == "mine"


async def test_the_more_urgent_goes_first_where_requests_wait() -> None:
    async with sharing([LocalReplica(capacity=1, delay_s=0.03)], 1) as (omni,):
        ended: list[str] = []

        async def run(name: str, priority: int) -> None:
            await ask(omni, name, priority)
            ended.append(name)

        first = asyncio.create_task(run("running on and on", 0))
        await asyncio.sleep(0.02)
        tasks = [asyncio.create_task(run(f"late{number}", 5)) for number in range(3)]
        await asyncio.sleep(0.01)
        tasks.append(asyncio.create_task(run("urgent", -5)))
        await asyncio.gather(first, *tasks)
        assert ended == ["running on and on", "urgent", "late0", "late1", "late2"]


async def test_an_abort_is_done_when_the_engine_is_idle() -> None:
    """The client leaves; abort returns when the replica has acknowledged, and the slot serves the next at once."""
    replica = LocalReplica(capacity=1, delay_s=0.02)
    async with sharing([replica], 1) as (omni,):
        running = asyncio.create_task(collect(omni.generate({"prompt": "word " * 500}, request_id="long")))
        await until(lambda: replica.server.queue_length == 1)
        began_s = time.monotonic()
        await omni.abort("long")
        assert time.monotonic() - began_s < soon_s(1.0)
        await until(lambda: replica.server.queue_length == 0 and not replica.engine.has_unfinished(), 2.0)
        assert (await running)[-1].finish_reason == "abort"
        assert await ask(omni, "next") == "next"


@pytest.mark.attack("H3")
async def test_a_hub_that_asks_for_everything_and_runs_nothing_shuts_nobody_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """1. a hub with a session says all the time that endless requests wait, for ever, until it has both slots
    2. another hub's requests are answered all the same
    3. the replica tells which hub holds what, and says once which hub it is and what to do
    """
    replica, keys = LocalReplica(capacity=2), KeyPair.generate()
    async with sharing([replica], 1, others={"greedy": keys.public}) as (omni,):
        greedy = replica.raw_hub("greedy", keys)
        for socket in (greedy.input, greedy.output):
            socket.send(wire.encode(wire.Hello(hub_id="greedy", epoch=greedy.epoch, session=1)))

        async def demand() -> None:
            want = wire.WantCredits(epoch=greedy.epoch, session=1, waiting=(1 << 53) - 1, oldest_wait_s=1e9)
            while True:
                greedy.send(want)
                await asyncio.sleep(0.02)

        demanding = asyncio.create_task(demand())
        try:
            await until(lambda: replica.server.credits_by_hub == {"greedy": 2})
            async with asyncio.timeout(30.0):
                for number in range(3):
                    assert await ask(omni, f"mine{number}") == f"mine{number}"
        finally:
            demanding.cancel()
            await asyncio.gather(demanding, return_exceptions=True)
            greedy.close()
    assert replica.server.counters["hoarded_credits"] >= 1
    said = [line for line in caplog.messages if line.startswith("server.hoarded_credits ")]
    assert len(said) == 1
    assert "hub=greedy credits=2" in said[0]
    assert said[0].endswith("omni hub revoke greedy")
