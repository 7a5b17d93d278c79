"""Faults on the way to one etcd, in its history and in the replicas themselves; what docs/failure-tests.md lists."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import random
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from omni_discovery.clients import OmniCoordClientForHub, OmniCoordClientForStage
from omni_discovery.etcd.embedded import EmbeddedEtcd
from omni_discovery.etcd.http import get_text
from omni_discovery.etcd.store import EtcdKV
from omni_discovery.records.keys import hub_key, replica_key
from omni_discovery.records.schema import HubRecord, ReplicaRecord, ReplicaStatus, encode_record
from tests.support.population import Population
from tests.support.processes import wait_for
from tests.support.proxy import TcpProxy
from tests.support.quiet import soon_s
from tests.support.registry import EtcdServer, compact, etcdctl


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with EmbeddedEtcd() as etcd:
        yield etcd.endpoint


@pytest.fixture
def namespace() -> str:
    return f"fault-{uuid.uuid4().hex}"


def counted(endpoint: str, metric: str) -> float:
    """The sum of a metric over its labels; ``metric`` is how its lines begin."""
    lines = get_text(endpoint, "/metrics", timeout_s=5.0).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(metric))


def test_connections_reset_at_any_phase_of_the_ttl_never_cost_a_lease(
    endpoint: str, namespace: str, rounds: int
) -> None:
    chance = random.Random(2)
    with TcpProxy(endpoint) as proxy, Population(proxy.endpoint, namespace, ttl_s=2.0) as population:
        before = population.lives()
        population.membership_changes()
        for _ in range(4 * rounds):
            time.sleep(chance.uniform(0.0, 1.0))
            proxy.cut()
        population.settle()
        assert population.lives() == before
        assert population.membership_changes() == []


def test_many_clients_that_nobody_lets_in_ask_seldom_and_lose_nothing(endpoint: str, namespace: str) -> None:
    """Ten clients are refused for three seconds, less than the TTL."""
    with TcpProxy(endpoint) as proxy, ExitStack() as stack:
        replicas = [stack.enter_context(replica(proxy.endpoint, namespace, 6.0)) for _ in range(10)]
        before = [each.wait_registered(10.0) for each in replicas]
        proxy.refuse()
        began = proxy.attempts
        time.sleep(3.0)
        asked = proxy.attempts - began
        proxy.take()
        time.sleep(1.0)
        assert asked / 3.0 / len(replicas) < 4.0
        assert [each.wait_registered(5.0) for each in replicas] == before


def test_events_that_come_late_over_a_silent_connection_are_not_lost(endpoint: str, namespace: str) -> None:
    with TcpProxy(endpoint) as proxy, OmniCoordClientForHub(proxy.endpoint, namespace=namespace) as hub:
        hub.wait_synced(10.0)
        proxy.freeze()
        for number in range(20):
            etcdctl(endpoint, "put", hub_key(namespace, f"h{number}"), f'{{"hub_id": "h{number}"}}')
        etcdctl(endpoint, "del", hub_key(namespace, "h3"))
        proxy.thaw()
        wait_for("all that was said meanwhile", lambda: len(hub.view().hubs) == 19, 5.0)
        assert "h3" not in hub.view().hubs


def test_leases_that_end_and_a_compaction_while_the_watch_is_cut_leave_no_ghost(endpoint: str, namespace: str) -> None:
    with (
        TcpProxy(endpoint) as proxy,
        OmniCoordClientForHub(proxy.endpoint, namespace=namespace) as hub,
        replica(endpoint, namespace, 30.0) as gone,
        replica(endpoint, namespace, 30.0) as stays,
    ):
        gone.wait_registered(10.0)
        stays.wait_registered(10.0)
        wait_for("both at the hub", lambda: len(hub.get_replica_list().replicas) == 2)
        proxy.refuse()
        gone.close()
        compact(endpoint)
        proxy.take()
        wait_for("one at the hub", lambda: len(hub.get_replica_list().replicas) == 1, 4.0)


def test_a_storm_of_compactions_over_an_idle_namespace_costs_no_lists(
    endpoint: str, namespace: str, rounds: int
) -> None:
    """Each moves the history's beginning past our place in it, which a standing watch must not mind."""
    with Population(endpoint, namespace) as population:
        population.membership_changes()
        time.sleep(1.5)
        listed = counted(endpoint, 'grpc_server_handled_total{grpc_code="OK",grpc_method="Range"')
        storms = 5 * rounds
        for number in range(storms):
            etcdctl(endpoint, "put", "/elsewhere", str(number))
            # Reads the revision, which is a Range itself.
            compact(endpoint)
        listed = counted(endpoint, 'grpc_server_handled_total{grpc_code="OK",grpc_method="Range"') - listed
        assert listed <= storms + 10
        population.settle()
        assert population.membership_changes() == []


def test_renewals_are_three_per_ttl_and_no_more(endpoint: str, namespace: str) -> None:
    received = 'grpc_server_msg_received_total{grpc_method="LeaseKeepAlive"'
    with ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(replica(endpoint, namespace, 3.0)).wait_registered(10.0)
        before = counted(endpoint, received)
        time.sleep(4.0)
        renewals = counted(endpoint, received) - before
    # Each is sent up to a tenth early; one more of each may fall into the time.
    assert 5 * 3 <= renewals <= 5 * (4.0 / (0.9 * 1.0) + 1)


def test_a_hub_that_starts_on_a_large_namespace_is_there_soon(endpoint: str, namespace: str) -> None:
    """4000 replicas and 1000 hubs: less than the most that a view reads of each."""
    record = ReplicaRecord(stage_id=0, replica_id=0, input_addr="i", output_addr="o", status=ReplicaStatus.UP)
    records: dict[str, HubRecord | ReplicaRecord] = {}
    for number in range(1000):
        records[hub_key(namespace, f"h{number}")] = HubRecord(hub_id=f"h{number}")
    for number in range(4000):
        records[replica_key(namespace, 0, number)] = msgspec.structs.replace(record, replica_id=number)

    async def fill() -> None:
        kv = EtcdKV(endpoint, try_timeout_s=10.0)
        left = iter(records.items())
        while some := list(itertools.islice(left, 250)):
            await asyncio.gather(*(kv.put(key, encode_record(value)) for key, value in some))
        await kv.close()

    asyncio.run(fill())
    began_s = time.monotonic()
    with OmniCoordClientForHub(endpoint, namespace=namespace) as hub:
        view = hub.wait_synced(10.0)
        assert (len(view.replicas), len(view.hubs)) == (4000, 1000)
        assert time.monotonic() - began_s < soon_s(3.0)


def register_and_wait(endpoint: str, namespace: str, registered: Any) -> None:
    with replica(endpoint, namespace, 2.0) as client:
        registered.put(client.wait_registered(10.0))
        signal.pause()


def test_a_replica_that_is_stopped_keeps_its_life_for_less_than_a_ttl_and_gets_a_new_one_after_three(
    endpoint: str, namespace: str
) -> None:
    """SIGSTOP as a debugger or a busy machine would; after SIGCONT there is one key again, leased, of a later epoch."""
    spawn = multiprocessing.get_context("spawn")
    registered = spawn.Queue()
    child = spawn.Process(target=register_and_wait, args=(endpoint, namespace, registered))
    child.start()
    try:
        _, epoch = registered.get(timeout=20.0)
        with OmniCoordClientForHub(endpoint, namespace=namespace) as hub:
            wait_for("the replica at the hub", lambda: hub.get_replica_list().replicas)
            stop_for(child.pid, 1.0)
            time.sleep(1.0)
            assert [info.epoch for info in hub.get_replica_list().replicas] == [epoch]
            os.kill(child.pid or 0, signal.SIGSTOP)
            wait_for("it to be gone", lambda: not hub.view().replicas, 8.0)
            time.sleep(2.0)
            os.kill(child.pid or 0, signal.SIGCONT)
            wait_for("it to be back", lambda: hub.get_replica_list().replicas, 5.0)
            (info,) = hub.get_replica_list().replicas
            assert info.epoch > epoch
            assert info.replica_id == 0
    finally:
        child.kill()
        child.join()


def stop_for(pid: int | None, delay_s: float) -> None:
    os.kill(pid or 0, signal.SIGSTOP)
    time.sleep(delay_s)
    os.kill(pid or 0, signal.SIGCONT)


def test_etcd_dead_for_three_ttls_ends_nobody_and_all_are_seen_again_soon(tmp_path: Path) -> None:
    server = EtcdServer(tmp_path)
    server.start()
    try:
        with Population(server.endpoint, "default", ttl_s=1.0) as population:
            before = population.lives()
            server.kill()
            time.sleep(3.5)
            for hub in population.hubs:
                assert len(hub.get_replica_list().replicas) == 3
                assert hub.view().stale_since_s is not None
            server.start()
            began_s = time.monotonic()
            population.settle(3.0)
            assert time.monotonic() - began_s < soon_s(3.0)
            assert population.lives() == before
            population.assert_keys_are_the_living(server.endpoint)
    finally:
        server.kill()


def replica(endpoint: str, namespace: str, ttl_s: float) -> OmniCoordClientForStage:
    return OmniCoordClientForStage(endpoint, "tcp://h:1", "tcp://h:2", 0, namespace=namespace, ttl_s=ttl_s)
