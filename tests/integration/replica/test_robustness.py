"""What a replica survives: hubs that read nothing, engines that keep everything to themselves, clocks that jump."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from hub.async_omni import AsyncOmni
from omni_discovery import wire
from omni_discovery.clients import OmniCoordClientForHub, OmniCoordClientForStage
from omni_discovery.curve import KeyPair
from omni_discovery.records.schema import ReplicaInfo
from stage_runtime.config import ServerConfig
from tests.support.child_replica import ChildReplica
from tests.support.hub_fakes import ONE_STAGE, QUICK, ask, deploy_of, started_hub, until
from tests.support.local_replica import LocalReplica
from tests.support.processes import wait_for
from tests.support.quiet import patience_s, soon_s
from tests.support.registry import EtcdServer
from tests.support.replica_hub import eventually

KEYS, SLOW_KEYS = KeyPair.generate(), KeyPair.generate()
HUBS = {KEYS.public: "hub-1", SLOW_KEYS.public: "slow"}
SHORT_BEATS = replace(QUICK, zmq_heartbeat_interval_s=0.1, zmq_heartbeat_timeout_s=0.4, accept_limit_s=5.0)


@asynccontextmanager
async def hub(*infos: ReplicaInfo) -> AsyncIterator[AsyncOmni]:
    # What takes all of the interpreter takes longer where others want the core.
    limits = {name: patience_s(getattr(SHORT_BEATS, name)) for name in ("accept_limit_s", "request_timeout_s")}
    omni = AsyncOmni(deploy_of(ONE_STAGE), "hub-1", KEYS, replace(SHORT_BEATS, **limits))
    async with started_hub(omni, *infos, timeout_s=10.0):
        yield omni


def test_a_hub_that_reads_nothing_loses_its_own_work_and_slows_nobody() -> None:
    """1. a hub asks for more than fits into all queues to it, and reads none of it; another one works beside it
    2. the first is given up: its work ends, the engine is free; the other one was served all the time
    3. the first reads again: it greets and is served
    """
    config = ServerConfig(outbox_messages=200, hub_grace_s=3.0)
    with LocalReplica(HUBS, config=config, capacity=17) as replica, ThreadPoolExecutor(1) as others:
        given_up = threading.Event()
        beside = others.submit(_served_until, given_up, replica)
        slow = replica.raw_hub("slow", SLOW_KEYS, receive_queue=4)
        slow.hello()
        text = " ".join(["word" * 250] * 3000)
        for number in range(16):
            slow.submit(f"r{number}", text)
            assert isinstance(slow.acknowledged(), wire.Accepted)
        try:
            assert eventually(lambda: replica.server.counters["hubs_given_up"] > 0, 20.0)
            assert eventually(lambda: replica.server.queue_length <= 1)
        finally:
            given_up.set()
        assert beside.result(20.0) > 10
        assert eventually(lambda: not replica.server.queue_length and not replica.engine.has_unfinished())
        again = replica.raw_hub("slow", SLOW_KEYS)
        again.hello()
        again.submit("again", "hello")
        assert isinstance(again.acknowledged(), wire.Accepted)
        assert again.collect("again")[1].finish_reason == "stop"
        slow.close()
        again.close()


@pytest.mark.attack("I1")
def test_a_hub_that_reads_late_gets_every_word_and_its_requests_pause_meanwhile() -> None:
    """1. a hub asks for more than fits into all queues to it, and reads none of it: the engine stands still
    2. another hub is served all the same; 3. the first reads: no word is missing, and it was never given up
    """
    config = ServerConfig(outbox_messages=600, hub_grace_s=60.0)
    with LocalReplica(HUBS, config=config, capacity=17, delay_s=0.001) as replica:
        slow, fine = replica.raw_hub("slow", SLOW_KEYS, receive_queue=4), replica.raw_hub("hub-1", KEYS)
        slow.hello()
        fine.hello()
        text = " ".join(["word" * 250] * 3000)
        for number in range(16):
            slow.submit(f"r{number}", text)
            assert isinstance(slow.acknowledged(), wire.Accepted)
        assert eventually(lambda: replica.server.counters["hubs_held_back"] > 0, 30.0)
        assert eventually(lambda: not replica.engine.has_unfinished(), 30.0)
        fine.submit("f", "hello")
        assert fine.acknowledged(30.0)
        assert fine.collect("f", 30.0)[1].finish_reason == "stop"
        said, ends, seqs = defaultdict[str, list[str]](list), 0, Counter[str]()
        while ends < 16:
            message: Any = slow.receive(slow.output, (wire.Chunk, wire.StageDone), 30.0)
            assert message.seq == seqs[message.request_id]
            seqs[message.request_id] += 1
            ends += isinstance(message, wire.StageDone)
            if isinstance(message, wire.Chunk):
                said[message.request_id].append(message.text)
        assert {"".join(parts) for parts in said.values()} == {text}
        assert len(said) == 16
        assert replica.server.counters["hubs_given_up"] == 0
        slow.close()
        fine.close()


def _served_until(enough: threading.Event, replica: LocalReplica) -> int:
    """Ask one thing after the other; how many were answered, each within two seconds."""
    fine = replica.raw_hub("hub-1", KEYS)
    try:
        fine.hello()
        for number in itertools.count():
            fine.submit(f"f{number}", "hello")
            fine.acknowledged(2.0)
            assert fine.collect(f"f{number}", 2.0)[1].finish_reason == "stop"
            if enough.is_set() and number > 10:
                return number
    finally:
        fine.close()
    raise AssertionError


async def test_an_engine_that_keeps_the_interpreter_to_itself_does_not_look_dead() -> None:
    """1. a replica's engine lets no other thread of its process run, for several times the heartbeat timeout
    2. its session stands, nobody else gets its work, and its answers come when it is through
    """
    with ChildReplica(HUBS) as replica:
        async with hub(replica.info) as omni:
            began_s = time.monotonic()
            asked = [asyncio.create_task(ask(omni, "hog the interpreter")) for _ in range(2)]
            beside = asyncio.create_task(ask(omni))
            least = 1
            while not all(each.done() for each in asked):
                least = min(least, omni.stage_status()[0].pickable)
                await asyncio.sleep(0.01)
            assert time.monotonic() - began_s > 2 * SHORT_BEATS.zmq_heartbeat_timeout_s
            assert least == 1
            assert [await each for each in asked] == ["hog the interpreter"] * 2
            assert await beside == "hello there"
            assert omni.metrics.get_sample_value("omni_hub_session_losses_total", {"stage": "0"}) == 0.0


async def test_a_client_that_leaves_idles_the_engine_within_a_second() -> None:
    """Also where more requests wait than the replica runs at a time."""
    with LocalReplica(HUBS, capacity=4, delay_s=0.01) as replica:
        async with hub(replica.info) as omni:
            asking = [asyncio.create_task(ask(omni, "word " * 2000)) for _ in range(12)]
            await until(lambda: len(replica.engine._speeches) == 4)
            for each in asking:
                each.cancel()
            left_s = time.monotonic()
            await until(lambda: not replica.engine.has_unfinished() and not replica.server.queue_length)
            assert time.monotonic() - left_s < soon_s(1.0)
            assert await ask(omni) == "hello there"


def test_clocks_that_jump_by_an_hour_and_back_change_nothing(
    server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. a replica's lease, a hub's view and a session stand; from now on each look at the wall clock gives a time
       that is an hour ahead of or behind the one before
    2. for several TTLs: the same lease and epoch, the view is fresh, the session stands, all requests are served
    """
    with LocalReplica(HUBS) as replica:
        info = replica.info
        with (
            OmniCoordClientForStage(server.endpoint, info.input_addr, info.output_addr, 0, ttl_s=1.0) as stage,
            OmniCoordClientForHub(server.endpoint, ttl_s=1.0) as view,
        ):
            before = stage.wait_registered(10.0)
            wait_for("the replica", lambda: view.get_replica_list().replicas)
            real, jumps = time.time, itertools.cycle((3600.0, -3600.0, 0.0))
            with monkeypatch.context() as patch:
                patch.setattr(time, "time", lambda: real() + next(jumps))
                asyncio.run(_serve_for(6.0, info, view))
            assert stage.wait_registered(1.0) == before
            assert view.get_replica_list().stale_since_s is None


async def _serve_for(length_s: float, info: ReplicaInfo, view: OmniCoordClientForHub) -> None:
    async with hub(info) as omni:
        until_s = time.monotonic() + length_s
        while time.monotonic() < until_s:
            assert await ask(omni) == "hello there"
            assert omni.stage_status()[0].pickable == 1
            assert len(view.get_replica_list().replicas) == 1
            await asyncio.sleep(0.02)
        assert omni.metrics.get_sample_value("omni_hub_session_losses_total", {"stage": "0"}) == 0.0
