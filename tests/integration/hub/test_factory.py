"""The public face of the orchestrator: its attributes, its queues, and the factory that makes clients in its place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, get_args

import pytest

from hub.async_omni import AsyncOmni
from hub.orchestrator import orchestrator as module
from hub.orchestrator.orchestrator import Orchestrator
from hub.pool.stage_pool import StagePool
from hub.replicas.stage_client import StageClient
from omni_discovery.curve import KeyPair
from omni_discovery.errors import StageUnavailableError
from tests.support.hub_fakes import ONE_STAGE, QUICK, FakeReplica, collect, deploy_of, echo, show, text_of, until

Factory = Callable[[Orchestrator, int, int], Awaitable[Any]]


@asynccontextmanager
async def hub_with(factory: Factory) -> AsyncIterator[AsyncOmni]:
    """A hub that asks this factory for clients."""

    async def ask(stage_id: int, replica_id: int) -> Any:
        assert omni._orchestrator is not None
        return await factory(omni._orchestrator, stage_id, replica_id)

    keys = KeyPair.generate()
    omni = AsyncOmni(deploy_of(ONE_STAGE), "hub-1", keys, QUICK, "round-robin", remote_replica_factory=ask)
    await omni.start()
    try:
        yield omni
    finally:
        await omni.close()


async def ask(omni: AsyncOmni, prompt: str) -> str:
    return text_of(await collect(omni.generate({"prompt": prompt})))


async def test_the_orchestrator_shows_what_users_know() -> None:
    async with hub_with(Orchestrator.connect_replica) as omni:
        orchestrator = omni._orchestrator
        assert isinstance(orchestrator, Orchestrator)
        assert orchestrator.async_chunk is False
        assert (orchestrator.num_stages, orchestrator.request_states) == (1, {})
        assert [type(pool) for pool in orchestrator.stage_pools] == [StagePool]
        for name in ("request", "output", "rpc"):
            queue = getattr(orchestrator, f"{name}_async_queue")
            assert isinstance(queue, asyncio.Queue)
            assert queue.maxsize > 0
        assert asyncio.iscoroutinefunction(orchestrator.run)
    assert get_args(module.RemoteReplicaFactory) == ([int, int], Awaitable[Any])


async def test_a_factory_is_asked_once_for_each_replica_however_often_its_record_changes() -> None:
    """1. the factory takes its time; meanwhile the record comes three times more
    2. it was asked once, and its client serves
    """
    asked: list[tuple[int, int]] = []
    go_on = asyncio.Event()

    async def slow(orchestrator: Orchestrator, stage_id: int, replica_id: int) -> StageClient:
        asked.append((stage_id, replica_id))
        await go_on.wait()
        return await orchestrator.connect_replica(stage_id, replica_id)

    replica = FakeReplica(echo, replica_id=4)
    async with hub_with(slow) as omni:
        for _ in range(4):
            show(omni, replica.info)
            await asyncio.sleep(0.02)
        assert omni.stage_status()[0].pickable == 0
        go_on.set()
        await until(lambda: omni.stage_status()[0].pickable == 1)
        assert await ask(omni, "x") == "x "
        show(omni, replica.info)
        assert await ask(omni, "y") == "y "
        assert asked == [(0, 4)]
    replica.kill()


async def test_a_client_that_was_made_too_late_is_closed() -> None:
    """Its record was removed while it was made: nothing of it is left, and another replica serves."""
    made: list[StageClient] = []
    go_on = asyncio.Event()

    async def slow(orchestrator: Orchestrator, stage_id: int, replica_id: int) -> StageClient:
        client = await orchestrator.connect_replica(stage_id, replica_id)
        if replica_id == 0:
            made.append(client)
            await go_on.wait()
        return client

    first, second = FakeReplica(echo), FakeReplica(echo, replica_id=1)
    async with hub_with(slow) as omni:
        show(omni, first.info, second.info)
        await until(lambda: bool(made) and omni.stage_status()[0].pickable == 1)
        show(omni, second.info)
        await asyncio.sleep(0.05)
        go_on.set()
        await asyncio.sleep(0.05)
        assert omni._orchestrator is not None
        assert list(omni._orchestrator._membership.clients) == [second.info.input_addr]
        assert not made[0].session_up
        assert await ask(omni, "x") == "x "
    first.kill()
    second.kill()


async def test_a_factory_that_fails_is_asked_again_when_the_record_changes(caplog: pytest.LogCaptureFixture) -> None:
    asked = 0

    async def stumble(orchestrator: Orchestrator, stage_id: int, replica_id: int) -> StageClient:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise OSError("not now")
        return await orchestrator.connect_replica(stage_id, replica_id)

    replica = FakeReplica(echo)
    async with hub_with(stumble) as omni:
        show(omni, replica.info)
        await until(lambda: "replica.unattached replica=0/0" in caplog.text)
        show(omni, replace(replica.info, queue_length=1))
        await until(lambda: omni.stage_status()[0].pickable == 1)
        assert await ask(omni, "x") == "x "
        orchestrator = omni._orchestrator
        assert orchestrator is not None
        with pytest.raises(StageUnavailableError, match="shows no replica 0/7"):
            await orchestrator.connect_replica(0, 7)
    replica.kill()
