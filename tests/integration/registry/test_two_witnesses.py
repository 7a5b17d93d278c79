"""The session says who answers, whatever the lease says: processes that die, freeze, or can't be reached by one hub."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from hub.async_omni import AsyncOmni
from hub.request.outputs import OmniOutput
from omni_discovery.clients import OmniCoordClientForHub
from omni_discovery.curve import KeyPair
from omni_discovery.errors import RequestError, StageUnavailableError
from omni_discovery.records.schema import HubRecord, ReplicaInfo
from tests.support.child_replica import ChildReplica
from tests.support.hub_fakes import ONE_STAGE, QUICK, collect, deploy_of, show, started_hub, text_of, until
from tests.support.proxy import TcpProxy
from tests.support.quiet import soon_s
from tests.support.replica_stage import Deployment, echo_stages

KEYS, OTHER_KEYS = KeyPair.generate(), KeyPair.generate()
HUBS = {KEYS.public: "hub-1", OTHER_KEYS.public: "hub-2"}
#: A silent peer is given up after 0.6 s here, and by default after 3.
CONFIG = replace(QUICK, zmq_heartbeat_interval_s=0.2, zmq_heartbeat_timeout_s=0.6, silence_grace_s=1.0)
HEARTBEAT_S = 0.6 + 0.2
#: What a busy machine of two cores may add to any of these times.
MARGIN_S = 0.7


@asynccontextmanager
async def hub(*infos: ReplicaInfo, keys: KeyPair = KEYS) -> AsyncIterator[AsyncOmni]:
    """A hub that sees these records."""
    omni = AsyncOmni(deploy_of(ONE_STAGE), HUBS[keys.public], keys, CONFIG, "round-robin")
    async with started_hub(omni, *infos, timeout_s=10.0):
        yield omni


def pickable(omni: AsyncOmni) -> int:
    return omni.stage_status()[0].pickable


class Load:
    """Asks all the time; every answer with the replica it came from and the moment it was asked for."""

    def __init__(self, omni: AsyncOmni) -> None:
        self._omni = omni
        self._asking: set[asyncio.Task[None]] = set()
        self._ticker = asyncio.create_task(self._run())
        self.answers: list[tuple[float, str, str]] = []
        self.errors: list[RequestError] = []

    async def stop(self) -> None:
        self._ticker.cancel()
        await asyncio.gather(*self._asking)

    def since(self, moment_s: float) -> list[str]:
        """Who answered what was asked from that moment on."""
        return [replica for asked_s, replica, _ in self.answers if asked_s >= moment_s]

    def has_answer_of(self, replica: str, since_s: float) -> bool:
        return replica in self.since(since_s)

    async def _run(self) -> None:
        while True:
            task = asyncio.create_task(self._ask())
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
            await asyncio.sleep(0.01)

    async def _ask(self) -> None:
        asked_s = time.monotonic()
        try:
            outputs = await collect(self._omni.generate({"prompt": "one two three"}))
        except RequestError as error:
            self.errors.append(error)
        else:
            self.answers.append((asked_s, outputs[0].replica, text_of(outputs)))


async def seconds_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> float:
    began_s = time.monotonic()
    await until(condition, timeout_s)
    return time.monotonic() - began_s


async def test_a_killed_process_is_picked_no_more_within_moments_and_no_client_notices() -> None:
    """1. two replicas under load; one is killed while its record still says that it is up
    2. it is out of the picks at once; every request is answered, all by the other
    """
    with ChildReplica(HUBS) as a, ChildReplica(HUBS, replica_id=1) as b:
        async with hub(a.info, b.info) as omni:
            load = Load(omni)
            await asyncio.sleep(0.3)
            a.kill()
            assert await seconds_until(lambda: pickable(omni) == 1) < soon_s(0.5)
            gone_s = time.monotonic()
            await asyncio.sleep(0.5)
            await load.stop()
            assert load.errors == []
            assert {text for _, _, text in load.answers} == {"one two three"}
            assert {replica for _, replica, _ in load.answers} == {"0/0", "0/1"}
            assert set(load.since(gone_s)) == {"0/1"}
            assert omni.stage_status()[0].registered == 2


async def test_a_stopped_process_is_picked_no_more_after_the_heartbeats_and_again_when_it_goes_on() -> None:
    """1. one of two replicas is stopped: nothing is closed, it only says nothing
    2. it is out of the picks within the heartbeat time, and what it had is done by the other
    3. it goes on: it is picked again, the same process, nobody restarted anything
    """
    with ChildReplica(HUBS) as a, ChildReplica(HUBS, replica_id=1) as b:
        async with hub(a.info, b.info) as omni:
            load = Load(omni)
            for _ in range(2):
                a.signal(signal.SIGSTOP)
                assert await seconds_until(lambda: pickable(omni) == 1) < soon_s(HEARTBEAT_S + MARGIN_S)
                out_s = time.monotonic()
                await asyncio.sleep(0.3)
                assert set(load.since(out_s)) <= {"0/1"}
                a.signal(signal.SIGCONT)
                await until(lambda: pickable(omni) == 2)
                await until(partial(load.has_answer_of, "0/0", time.monotonic()))
            await load.stop()
            assert load.errors == []
            assert {text for _, _, text in load.answers} == {"one two three"}
            assert a.is_running
            assert b.is_running


async def test_a_hub_whose_own_network_is_cut_does_not_condemn_the_pool_and_serves_when_it_heals() -> None:
    """1. a hub behind a network of its own, another one beside it; both use the same two replicas
    2. that network goes silent: the first has nobody to pick and says so; the other one's requests are all right,
       and neither its view of the replicas nor its picks have changed
    3. the network heals: the first serves again
    """
    with ChildReplica(HUBS) as a, ChildReplica(HUBS, replica_id=1) as b, ExitStack() as stack:
        addresses = [*_addresses(a.info), *_addresses(b.info)]
        ways = {addr: stack.enter_context(TcpProxy(addr.removeprefix("tcp://"))) for addr in addresses}
        seen = [_through(each.info, ways) for each in (a, b)]
        async with hub(*seen) as cut, hub(a.info, b.info, keys=OTHER_KEYS) as other:
            load = Load(other)
            for way in ways.values():
                way.freeze()
            assert await seconds_until(lambda: pickable(cut) == 0) < soon_s(HEARTBEAT_S + MARGIN_S)
            with pytest.raises(StageUnavailableError, match=r"no UP replica for stage 0 after 1\.0s"):
                await collect(cut.generate({"prompt": "anybody?"}))
            assert pickable(other) == 2
            for way in ways.values():
                way.thaw()
            await until(lambda: pickable(cut) == 2)
            assert text_of(await collect(cut.generate({"prompt": "here again"}))) == "here again"
            await load.stop()
            assert load.errors == []
            assert {replica for _, replica, _ in load.answers} == {"0/0", "0/1"}


def _addresses(info: ReplicaInfo) -> tuple[str, str]:
    return info.input_addr, info.output_addr


def _through(info: ReplicaInfo, ways: dict[str, TcpProxy]) -> ReplicaInfo:
    input_addr, output_addr = (f"tcp://{ways[addr].endpoint}" for addr in _addresses(info))
    return replace(info, input_addr=input_addr, output_addr=output_addr)


async def test_a_pool_that_dies_whole_is_told_and_a_new_one_serves_what_waits() -> None:
    """1. both replicas are killed with requests at work: each of them ends with an answer or a typed error
    2. a request waits; within its time a new process is registered, and serves it: the hub was never restarted
    """
    with ChildReplica(HUBS) as a, ChildReplica(HUBS, replica_id=1) as b:
        async with hub(a.info, b.info) as omni:
            load = Load(omni)
            await asyncio.sleep(0.2)
            a.kill()
            b.kill()
            assert await seconds_until(lambda: pickable(omni) == 0) < soon_s(0.5)
            await asyncio.sleep(0.7)
            await load.stop()
            assert load.errors
            assert {type(error) for error in load.errors} <= {StageUnavailableError}
            omni_wait = asyncio.create_task(collect(omni.generate({"prompt": "still there"})))
            with ChildReplica(HUBS, replica_id=1, epoch=90) as c:
                show(omni, a.info, c.info)
                outputs = await _either(omni_wait, omni)
                assert text_of(outputs) == "still there"


async def _either(waiting: asyncio.Task[list[OmniOutput]], omni: AsyncOmni) -> list[OmniOutput]:
    """What waited may have run out of time while the new process was starting: then it is asked again."""
    try:
        return await waiting
    except StageUnavailableError:
        await until(lambda: pickable(omni) == 1)
        return await collect(omni.generate({"prompt": "still there"}))


async def test_leases_and_sessions_are_witnesses_of_their_own(endpoint: str, namespace: str, tmp_path: Path) -> None:
    """1. a real replica is stopped for less than its lease: no picks within the heartbeat time, its record stands
    2. it goes on: picks resume under the same epoch
    3. it is stopped for longer than its lease: its record goes; it goes on: it registers anew and is picked, in the
       same process
    """
    keys = KeyPair.generate()
    with Deployment(endpoint, namespace, echo_stages({}), tmp_path) as deployment:
        # A lease that outlives the first stop on a slow machine, too.
        deployment.start(0, 1, "--omni-heartbeat-timeout", "12")
        (first,) = await asyncio.to_thread(deployment.wait_up)
        omni = AsyncOmni(deploy_of(ONE_STAGE), "hub-2", keys, CONFIG, "least-load")
        await omni.start()
        record = HubRecord(hub_id="hub-2", curve_public_key=keys.public)
        client = OmniCoordClientForHub(endpoint, namespace=namespace, ttl_s=5.0, hub=record, on_view=omni.apply_view)
        try:
            await until(lambda: pickable(omni) == 1)
            os.kill(first.pid, signal.SIGSTOP)
            assert await seconds_until(lambda: pickable(omni) == 0) < soon_s(HEARTBEAT_S + MARGIN_S)
            assert deployment.replicas() == [first] or deployment.replicas()[0].epoch == first.epoch
            os.kill(first.pid, signal.SIGCONT)
            await until(lambda: pickable(omni) == 1)
            assert deployment.replicas()[0].epoch == first.epoch
            assert text_of(await collect(omni.generate({"prompt": "same life"}))) == "same life"
            os.kill(first.pid, signal.SIGSTOP)
            await until(lambda: deployment.replicas() == [], 40.0)
            os.kill(first.pid, signal.SIGCONT)
            await until(lambda: pickable(omni) == 1, 40.0)
            (again,) = deployment.replicas()
            assert (again.pid, again.input_addr) == (first.pid, first.input_addr)
            assert again.epoch > first.epoch
            assert text_of(await collect(omni.generate({"prompt": "next life"}))) == "next life"
        finally:
            os.kill(first.pid, signal.SIGCONT)
            await asyncio.to_thread(client.close)
            await omni.close()
