"""A hub that a replica has given up, though its connection stands, is told so and comes back by itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from hub.async_omni import AsyncOmni
from omni_discovery.curve import KeyPair
from omni_discovery.errors import PoisonousRequestError, RequestError, StageUnavailableError
from omni_discovery.records.schema import HubRecord
from omni_discovery.view.table import Delta, View
from omni_discovery.wire.session import Peer
from tests.support.hub_fakes import ONE_STAGE, QUICK, ask, deploy_of, until
from tests.support.local_replica import LocalReplica
from tests.support.quiet import soon_s

KEYS = {"a": KeyPair.generate(), "b": KeyPair.generate()}


@pytest.fixture
def replica() -> Iterator[LocalReplica]:
    with LocalReplica({pair.public: name for name, pair in KEYS.items()}, capacity=2, delay_s=0.01) as running:
        yield running


def view_of(replica: LocalReplica, revoked: frozenset[str] = frozenset()) -> View:
    hubs = {name: HubRecord(hub_id=name, curve_public_key=pair.public) for name, pair in KEYS.items()}
    return View(replicas={(0, 0): replica.info}, hubs=hubs, revoked=revoked, revision=5)


@asynccontextmanager
async def hub(name: str, replica: LocalReplica) -> AsyncIterator[AsyncOmni]:
    config = replace(QUICK, accept_limit_s=5.0, pick_timeout_s=10.0, request_timeout_s=60.0)
    omni = AsyncOmni(deploy_of(ONE_STAGE), name, KEYS[name], config)
    await omni.start()
    try:
        omni.apply_view(view_of(replica), Delta())
        await until(lambda: omni.stage_status()[0].pickable == 1)
        yield omni
    finally:
        await omni.close()


async def serves(omni: AsyncOmni) -> bool:
    try:
        async with asyncio.timeout(soon_s(1.0)):
            return await ask(omni) == "hello there"
    except (RequestError, TimeoutError):
        return False


async def test_a_hub_that_read_too_slowly_loses_what_ran_there_and_serves_on(replica: LocalReplica) -> None:
    """1. the replica gives the hub up with a request at work and forgets its session; the connection stands
    2. within two of its probes the hub knows: that request ends by a typed error, or is done anew
    3. new requests are served, and the other hub was served all the time
    """
    async with hub("a", replica) as a, hub("b", replica) as b:
        long = asyncio.create_task(ask(a, "word " * 300))
        await until(lambda: replica.server.queue_length == 1)
        replica.server._sessions._give_up(_peer_of(replica, "a"), "reads nothing")
        assert await ask(b) == "hello there"
        async with asyncio.timeout(10.0):
            while not await serves(a):
                assert await ask(b) == "hello there"
        async with asyncio.timeout(10.0):
            (end,) = await asyncio.gather(long, return_exceptions=True)
        assert end == "word " * 300 or isinstance(end, RequestError)


@pytest.mark.attack("I1")
async def test_a_replica_that_gives_a_hub_up_again_and_again_is_not_ejected(replica: LocalReplica) -> None:
    """Not having read is the hub's fault: also the requests that were lost with it are not taken for their cause."""
    async with hub("a", replica) as a:
        for _ in range(2):
            long = asyncio.create_task(ask(a, "word " * 300))
            await until(lambda: replica.server.queue_length == 1, 30.0)
            replica.server._sessions._give_up(_peer_of(replica, "a"), "reads nothing")
            async with asyncio.timeout(30.0):
                (end,) = await asyncio.gather(long, return_exceptions=True)
            assert end == "word " * 300 or isinstance(end, RequestError)
            assert not isinstance(end, PoisonousRequestError)
            await until(lambda: a.stage_status()[0].pickable == 1, 30.0)
        assert await ask(a) == "hello there"
        (entry,) = a._running_orchestrator()._pools.of(replica.info).core.members.entries.values()
        assert entry.health.failures == 0


async def test_a_revoked_hub_ends_its_requests_at_once_and_serves_again_when_it_is_allowed(
    replica: LocalReplica, caplog: pytest.LogCaptureFixture
) -> None:
    """1. a hub with a request at work is revoked: that request and new ones end by a typed error, none hangs
    2. the other hub is served all the time; 3. it is allowed again: it serves, without a restart of anything
    """
    with caplog.at_level(logging.ERROR):
        async with hub("a", replica) as a, hub("b", replica) as b:
            long = asyncio.create_task(ask(b, "word " * 500))
            await until(lambda: replica.server.queue_length == 1)
            replica.server.set_revoked_hubs(frozenset({"b"}))
            b.apply_view(view_of(replica, frozenset({"b"})), Delta())
            with pytest.raises(StageUnavailableError, match="revoked"):
                async with asyncio.timeout(soon_s(1.0)):
                    await long
            await until(lambda: replica.server.queue_length == 0, 2.0)
            with pytest.raises(StageUnavailableError, match="revoked"):
                await ask(b)
            assert await ask(a) == "hello there"
            replica.server.set_revoked_hubs(frozenset())
            b.apply_view(view_of(replica), Delta())
            async with asyncio.timeout(8.0):
                while not await serves(b):
                    assert await ask(a) == "hello there"
            for _ in range(5):
                assert await ask(b) == "hello there"
                assert await ask(a) == "hello there"
    assert [record.getMessage().split()[0] for record in caplog.records] == ["hub.revoked"]


def _peer_of(replica: LocalReplica, hub_id: str) -> Peer:
    (peer,) = [each for each in replica.server._sessions.handshake.greeted_peers() if each.hub_id == hub_id]
    return peer
