"""Freshness on a real etcd: the beat that a hub sees come back, and what a hung server does to it."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import time
from collections import Counter

from omni_discovery.clients import OmniCoordClientForHub, OmniCoordClientForStage
from omni_discovery.records import keys
from omni_discovery.records.health import HubHealth, StageFailures
from omni_discovery.records.schema import HubRecord
from omni_discovery.view.freshness import LONGEST_ECHO_S, QUIET_S
from omni_discovery.view.hub_watcher import ViewOptions
from tests.support.registry import EtcdServer, etcdctl, eventually


def beat(endpoint: str, namespace: str, hub_id: str) -> tuple[int, int]:
    """The counter and the lease of a hub's beat; zeros while there is none."""
    found = json.loads(etcdctl(endpoint, "get", keys.beat_key(namespace, hub_id), "-w", "json")).get("kvs", [])
    if not found:
        return 0, 0
    value = etcdctl(endpoint, "get", keys.beat_key(namespace, hub_id), "--print-value-only")
    return int(json.loads(value)["counter"]), int(found[0].get("lease", 0))


async def test_two_hubs_beat_under_their_leases_and_stay_fresh(endpoint: str, namespace: str) -> None:
    counts = Counter[str]()
    options = ViewOptions(count=lambda name: counts.update([name]))
    hubs = [
        OmniCoordClientForHub(endpoint, namespace=namespace, hub=HubRecord(hub_id=hub_id), options=options)
        for hub_id in ("a", "b")
    ]
    with hubs[0] as first, hubs[1]:
        for hub_id in ("a", "b"):
            await eventually("three beats", lambda hub_id=hub_id: beat(endpoint, namespace, hub_id)[0] >= 3)
            assert beat(endpoint, namespace, hub_id)[1] != 0
        assert first.get_replica_list().stale_since_s is None
        assert counts == Counter()
    await eventually("the beats to go with their leases", lambda: beat(endpoint, namespace, "a") == (0, 0))


async def test_a_report_that_changed_is_seen_soon_by_who_only_reaches_etcd(endpoint: str, namespace: str) -> None:
    """1. a registry in which a replica changes its load all the time, so that no hub's watch is quiet
    2. a hub's report changes: its beat brings it all the same, and a command's client reads it
    """
    reports = [HubHealth(requests=1)]
    options = ViewOptions(health=lambda: reports[-1])
    replica = OmniCoordClientForStage(endpoint, "tcp://h:1", "tcp://h:2", 0, namespace=namespace)

    async def keep_busy() -> None:
        for load in itertools.count():
            replica.update_info(queue_length=load % 100)
            await asyncio.sleep(0.05)

    with (
        replica,
        OmniCoordClientForHub(endpoint, namespace=namespace, hub=HubRecord(hub_id="a"), options=options) as hub,
        OmniCoordClientForHub(endpoint, namespace=namespace) as reader,
    ):
        busy = asyncio.create_task(keep_busy())
        try:
            await asyncio.to_thread(replica.wait_registered, 30.0)
            await asyncio.to_thread(hub.wait_synced, 30.0)
            hub.request_beat()
            await eventually("a beat", reader.read_beats, 30.0)
            reports.append(HubHealth(requests=2, failures=[StageFailures(stage_id=0, failed=1)]))
            hub.request_beat()
            await eventually("the report", lambda: reader.read_beats()["a"].health == reports[-1], 30.0)
            assert set(reader.read_beats()) == {"a"}
        finally:
            busy.cancel()
    hub.request_beat()


async def test_a_server_that_hangs_makes_the_view_stale_and_then_fresh_again(server: EtcdServer) -> None:
    """SIGSTOP: no connection breaks, nothing is said. The beat that can't be written tells."""
    hub = OmniCoordClientForHub(server.endpoint, namespace="n", ttl_s=2.0, hub=HubRecord(hub_id="a"))
    with hub:
        await eventually("a beat", lambda: beat(server.endpoint, "n", "a")[0] >= 1)
        server.signal(signal.SIGSTOP)
        await eventually("a stale view", lambda: hub.get_replica_list().stale_since_s)
        server.signal(signal.SIGCONT)
        await eventually("a fresh view", lambda: hub.get_replica_list().stale_since_s is None)


async def test_the_age_of_a_view_counts_from_the_last_proof_before_the_server_hung(server: EtcdServer) -> None:
    """1. etcd is stopped: at most 3 s later the view is stale
    2. its age counts from the last beat that came back, at most a second before the stop, and keeps counting
    """
    slack_s = 0.6  # of a busy test machine
    hub = OmniCoordClientForHub(server.endpoint, namespace="n", hub=HubRecord(hub_id="a"))
    with hub:
        await eventually("two beats", lambda: beat(server.endpoint, "n", "a")[0] >= 2)
        await asyncio.sleep(0.5)
        assert hub.get_replica_list().stale_since_s is None
        stopped_at_s = time.time()
        server.signal(signal.SIGSTOP)
        try:
            while (since_s := hub.get_replica_list().stale_since_s) is None:
                assert time.time() < stopped_at_s + QUIET_S + LONGEST_ECHO_S + slack_s
                await asyncio.sleep(0.02)
            assert stopped_at_s - QUIET_S - slack_s <= since_s <= stopped_at_s + 0.1
            await asyncio.sleep(8.0)
            assert hub.get_replica_list().stale_since_s == since_s
        finally:
            server.signal(signal.SIGCONT)
        await eventually("a fresh view", lambda: hub.get_replica_list().stale_since_s is None)
