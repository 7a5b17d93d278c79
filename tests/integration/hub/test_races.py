"""Things that happen to a hub in one turn of its loop, or in an unlucky order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from hub.async_omni import AsyncOmni
from hub.config import QueueFullError
from hub.orchestrator.orchestrator import Orchestrator
from omni_discovery import wire
from omni_discovery.curve import KeyPair
from omni_discovery.errors import ReplicaLostError
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
    text_of,
    until,
)
from tests.support.quiet import soon_s


def inside(omni: AsyncOmni) -> Orchestrator:
    assert omni._orchestrator is not None
    return omni._orchestrator


def lose_connections(omni: AsyncOmni, replica: FakeReplica) -> None:
    """As the sockets' monitors tell it, both in one turn of the loop."""
    client = inside(omni)._membership.clients[replica.info.input_addr]
    for name, connection in client._connections.items():
        connection.connected = False
        client.connection_lost(name)


async def test_an_abort_in_the_turn_in_which_its_request_came_ends_it() -> None:
    replica = FakeReplica(accept_only)
    async with running_hub(replica) as omni:
        reader = asyncio.create_task(collect(omni.generate({"prompt": "x"}, request_id="mine")))
        await asyncio.sleep(0)
        await omni.abort("mine")
        async with asyncio.timeout(soon_s(1.0)):
            outputs = await reader
        assert outputs[-1].finish_reason == "abort"
        assert not inside(omni).request_states


async def test_replicas_lost_in_one_turn_cost_a_request_none_of_its_attempts() -> None:
    """1. nine replicas, of which eight lose their connections in one turn of the loop
    2. a request that comes in that same turn is served by the ninth
    """
    replicas = [FakeReplica(replica_id=number) for number in range(9)]
    async with running_hub(*replicas) as omni:
        for replica in replicas[:-1]:
            lose_connections(omni, replica)
        assert text_of(await collect(omni.generate({"prompt": "hello"}))) == "hello "
        assert len(replicas[-1].of(wire.Submit)) == 1


async def test_a_pick_that_waited_and_finds_its_replica_lost_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. a pick waits, for there is no replica
    2. one comes, and its connections are lost in the turn in which the pick gets it
    3. the request waits on, and another replica serves it with the first attempt
    """
    first, second = FakeReplica(), FakeReplica(replica_id=1)
    async with running_hub(wait=False) as omni:
        pool, lost = inside(omni).stage_pools[0], asyncio.Event()
        tell_pool = pool.core.session_up

        def lose_first(addr: str, now_s: float, *, uses_credits: bool = False) -> None:
            tell_pool(addr, now_s, uses_credits=uses_credits)
            if not lost.is_set():
                lost.set()
                lose_connections(omni, first)

        monkeypatch.setattr(pool.core, "session_up", lose_first)
        reader = asyncio.create_task(collect(omni.generate({"prompt": "hello"})))
        show(omni, first.info)
        async with asyncio.timeout(3.0):
            await lost.wait()
            first.kill()
            show(omni, second.info)
            assert text_of(await reader) == "hello "
        assert not first.of(wire.Submit)
        assert second.of(wire.Submit)[0].attempt == 0
        second.kill()


async def test_acknowledgements_that_come_together_are_all_heard() -> None:
    """1. five requests at a replica that the registry lists no more; all are aborted
    2. it dies: all five aborts end in one turn, and with the first its client is closed
    3. no abort is open any more
    """
    replica = FakeReplica(accept_only)
    replica.acknowledges_aborts = False
    async with running_hub(replica) as omni:
        readers = [asyncio.create_task(collect(omni.generate({"prompt": "x"}))) for _ in range(5)]
        await until(lambda: len(replica.of(wire.Submit)) == 5)
        show(omni)
        for reader in readers:
            reader.cancel()
        await until(lambda: len({abort.request_id for abort in replica.of(wire.Abort)}) == 5)
        assert len(inside(omni)._aborts) == 5
        replica.kill()
        await until(lambda: not inside(omni)._membership.clients)
        assert len(inside(omni)._aborts) == 0


async def test_of_two_records_with_one_address_the_newer_is_served() -> None:
    """1. a replica has got the port of one that died, whose key has not expired yet: both records are there
    2. the replica is served, and also when the old key has gone
    """
    replica = FakeReplica(epoch=900)
    dead = replace(replica.info, replica_id=1, epoch=800, curve_public_key=KeyPair.generate().public, pid=7)
    async with running_hub(wait=False) as omni:
        show(omni, replica.info, dead)
        await until(lambda: omni.stage_status()[0].pickable == 1)
        show(omni, replica.info)
        assert text_of(await collect(omni.generate({"prompt": "hello"}))) == "hello "
        replica.kill()


async def test_requests_that_did_not_leave_hold_no_slot_and_give_their_credit_back() -> None:
    """1. a replica lends four slots; the first request of a turn leaves, the three behind it find the queue full
    2. they end, and only the first is in flight; three credits are there again
    """
    replica = Lender(accept_only)
    replica.recalls = 0
    async with running_hub(replica, config=replace(QUICK, attempts=1)) as omni:
        pool, addr = inside(omni).stage_pools[0], replica.info.input_addr
        await until(lambda: pool.core.members.credits(addr) == 4)
        connection = inside(omni)._membership.clients[addr]._connections["input"]
        send, sent = connection.send, 0

        def send_one(frames: Sequence[bytes]) -> None:
            nonlocal sent
            sent += 1
            if sent > 1:
                raise QueueFullError("full")
            send(frames)

        connection.send = send_one  # type: ignore[method-assign]
        readers = [asyncio.create_task(collect(omni.generate({"prompt": "x"}))) for _ in range(4)]
        await until(lambda: sum(reader.done() for reader in readers) == 3)
        assert all(isinstance(reader.exception(), ReplicaLostError) for reader in readers if reader.done())
        assert len(pool.core.members.in_flight(addr)) == 1
        assert pool.core.members.credits(addr) == 3
        connection.send = send  # type: ignore[method-assign]
        for reader in readers:
            reader.cancel()


@pytest.mark.parametrize("requests", [1, 4])
async def test_a_full_send_queue_is_no_reason_to_avoid_a_replica(requests: int) -> None:
    """1. there is one replica, and nothing goes into the queue to it, for the first of a turn or for those behind it
    2. the queue has room again a moment later: the same replica serves them all
    """
    async with running_hub(FakeReplica()) as omni:
        (client,) = inside(omni)._membership.clients.values()
        connection, refused = client._connections["input"], 0
        send = connection.send

        def send_later(frames: Sequence[bytes]) -> None:
            nonlocal refused
            refused += 1
            if refused <= 2:
                raise QueueFullError("full")
            send(frames)

        connection.send = send_later  # type: ignore[method-assign]
        asked = [asyncio.create_task(collect(omni.generate({"prompt": "hello"}))) for _ in range(requests)]
        assert [text_of(await each) for each in asked] == ["hello "] * requests
        assert refused > 2
        assert omni.metrics.get_sample_value("omni_hub_replicas_ejected", {"stage": "0"}) == 0


class Lender(FakeReplica):
    """Lends four slots on its output socket and asks for three of them at once, before it welcomes on the other."""

    recalls = 3
    #: The session that it has lent them to: a Hello that comes twice, as on a slow machine, brings no more.
    lent_to = 0

    def _hear(self, name: str, message: wire.ToReplica) -> None:
        if not isinstance(message, wire.Hello):
            super()._hear(name, message)
            return
        about = {"epoch": message.epoch, "session": message.session, "queue_length": 0}
        if name == "output":
            self.say(wire.Welcome(**about, capacity=4), self._output)
            if message.session == self.lent_to:
                return
            self.lent_to = message.session
            self.say(wire.Grant(**about, credits=4))
            if self.recalls:
                self.say(wire.Recall(**about, credits=self.recalls))
        elif self.greets:
            self.say(wire.Welcome(**about, capacity=4), self._input)


async def test_credits_recalled_before_the_session_is_up_are_given_back_then() -> None:
    replica = Lender()
    replica.greets = False
    async with running_hub(replica, wait=False) as omni:
        await asyncio.sleep(0.1)
        replica.greets = True
        await until(lambda: bool(replica.of(wire.ReturnCredits)))
        assert [message.credits for message in replica.of(wire.ReturnCredits)] == [3]
        pool = inside(omni).stage_pools[0]
        await until(lambda: pool.core.members.credits(replica.info.input_addr) == 1)


async def test_a_release_that_waits_when_its_session_is_lost_leaves_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hub.replicas.pending._RELEASE_WITHIN_S", 60.0)
    keys = KeyPair.generate()
    thinker, painter = FakeReplica(echo, keys=keys), FakeReplica(picture, stage_id=1)
    async with running_hub(thinker, painter, deploy=PAIR) as omni:
        await collect(omni.generate({"prompt": "a cat"}, modalities=["image"]))
        client, info = inside(omni)._membership.clients[thinker.info.input_addr], thinker.info
        await until(lambda: bool(client._batcher._waiting))
        thinker.kill()
        await until(lambda: not client.session_up)
        assert thinker.of(wire.ReleasePayloads) == []
        again = FakeReplica(echo, keys=keys, epoch=info.epoch, bind=(info.input_addr, info.output_addr))
        await until(lambda: bool(client._batcher._waiting))
        client._batcher._end_wait()
        await until(lambda: bool(again.of(wire.ReleasePayloads)))
        (released,) = again.of(wire.ReleasePayloads)
        assert released.request_id == thinker.of(wire.Submit)[0].request_id
        again.kill()
