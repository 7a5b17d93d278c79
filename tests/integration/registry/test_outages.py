"""etcd dies, hangs, is wiped, compacts and comes back; replicas and hubs go on and heal by themselves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest

from omni_discovery.clients import OmniCoordClientForHub, OmniCoordClientForStage
from omni_discovery.errors import RegistryError
from omni_discovery.etcd.embedded import EmbeddedEtcd
from omni_discovery.etcd.store import EtcdKV
from omni_discovery.records.schema import ReplicaStatus
from omni_discovery.view.table import Delta, View
from tests.support.processes import wait_for
from tests.support.registry import EtcdServer, compact, etcdctl, revision_of


def stage(endpoint: str, ttl_s: float = 2.0) -> OmniCoordClientForStage:
    return OmniCoordClientForStage(endpoint, "tcp://h:1", "tcp://h:2", 0, ttl_s=ttl_s)


def is_fresh_with(hub: OmniCoordClientForHub, *ids: int) -> bool:
    found = hub.get_replica_list()
    return found.stale_since_s is None and [info.replica_id for info in found.replicas] == list(ids)


def test_an_outage_longer_than_the_ttl_keeps_lease_id_epoch_and_view(server: EtcdServer) -> None:
    """1. etcd is killed for longer than the TTL: the hub keeps its table and says that it is stale
    2. etcd is back on its data: the same lease is renewed, the same life goes on
    """
    with stage(server.endpoint, ttl_s=1.0) as replica, OmniCoordClientForHub(server.endpoint) as hub:
        before = replica.wait_registered(10.0)
        wait_for("the replica at the hub", lambda: is_fresh_with(hub, 0))
        server.kill()
        wait_for("the view to turn stale", lambda: hub.view().stale_since_s)
        time.sleep(2.0)
        assert [info.replica_id for info in hub.get_replica_list().replicas] == [0]
        replica.update_info(queue_length=5)
        server.start()
        wait_for("the view to be fresh", lambda: is_fresh_with(hub, 0), timeout_s=5.0)
        wait_for("the load", lambda: hub.get_replica_list().replicas[0].queue_length == 5)
        time.sleep(1.6)
        assert replica.wait_registered(0.1) == before
        assert is_fresh_with(hub, 0)


def test_an_outage_costs_next_to_no_cpu(server: EtcdServer) -> None:
    with stage(server.endpoint) as replica, OmniCoordClientForHub(server.endpoint) as hub:
        replica.wait_registered(10.0)
        hub.wait_synced(10.0)
        server.kill()
        before = resource.getrusage(resource.RUSAGE_SELF)
        time.sleep(3.0)
        after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3


def test_what_was_deleted_and_compacted_while_etcd_was_away_leaves_the_view(server: EtcdServer) -> None:
    """1. a replica's key is deleted and the history compacted while the hub can't hear it
    2. the hub's place in the history is gone: it lists again and the key leaves the view
    """
    etcdctl(server.endpoint, "put", "/omni/v1/default/hubs/h9", '{"hub_id": "h9"}')
    with OmniCoordClientForHub(server.endpoint) as hub:
        hub.wait_synced(10.0)
        assert "h9" in hub.view().hubs
        server.signal(signal.SIGSTOP)
        server.kill()
        wait_for("the view to turn stale", lambda: hub.view().stale_since_s)
        server.start()
        etcdctl(server.endpoint, "del", "/omni/v1/default/hubs/h9")
        for number in range(5):
            etcdctl(server.endpoint, "put", f"/elsewhere/{number}", "")
        compact(server.endpoint)
        wait_for("the key to go", lambda: "h9" not in hub.view().hubs, timeout_s=5.0)


def test_compaction_under_a_standing_watch_disturbs_nothing(endpoint: str, namespace: str) -> None:
    seen: list[bool] = []
    with OmniCoordClientForHub(
        endpoint, namespace=namespace, on_view=lambda view, delta: seen.append(view.stale_since_s is None)
    ) as hub:
        hub.wait_synced(10.0)
        for number in range(5):
            etcdctl(endpoint, "put", f"/omni/v1/{namespace}/hubs/h{number}", f'{{"hub_id": "h{number}"}}')
            compact(endpoint)
        wait_for("all of them", lambda: len(hub.view().hubs) == 5)
    assert all(seen)


def test_an_etcd_that_hangs_is_noticed_and_then_everything_goes_on(server: EtcdServer) -> None:
    """Nothing is closed and nothing is refused: only unanswered pings tell. The lease outlives it on the server."""
    with stage(server.endpoint, ttl_s=3.0) as replica, OmniCoordClientForHub(server.endpoint) as hub:
        replica.wait_registered(10.0)
        wait_for("the replica at the hub", lambda: is_fresh_with(hub, 0))
        server.signal(signal.SIGSTOP)
        wait_for("the view to turn stale", lambda: hub.view().stale_since_s, timeout_s=16.0)
        server.signal(signal.SIGCONT)
        wait_for("the view to be fresh", lambda: is_fresh_with(hub, 0), timeout_s=10.0)
        assert replica.wait_registered(5.0)[0] == 0


def test_a_wiped_etcd_is_filled_again(tmp_path: Path, server: EtcdServer) -> None:
    """The data is gone, the revision begins at 1: nobody is restarted, the pipeline is the only thing missing."""
    with stage(server.endpoint) as replica, OmniCoordClientForHub(server.endpoint) as hub:
        replica.wait_registered(10.0)
        for number in range(30):
            etcdctl(server.endpoint, "put", f"/elsewhere/{number}", "")
        wait_for("the replica at the hub", lambda: is_fresh_with(hub, 0))
        server.kill()
        (tmp_path / "data").rename(tmp_path / "lost")
        server.start()
        assert revision_of(server.endpoint) < 30
        wait_for("a new life", lambda: is_fresh_with(hub, 0) and hub.view().revision < 30, timeout_s=10.0)
        assert hub.get_replica_list().replicas[0].epoch == replica.wait_registered(5.0)[1]


@pytest.mark.parametrize("is_restored", [False, True], ids=["wiped", "restored from an older copy"])
def test_a_cordon_survives_an_etcd_that_has_lost_it(tmp_path: Path, server: EtcdServer, is_restored: bool) -> None:
    """1. the replica has a weight, a copy of the data is made, and it is cordoned
    2. etcd comes back without data, or with the copy: the replica is cordoned, and the key stands again
    3. an operator deletes the key: it takes work
    """
    key, seen = "/omni/v1/default/control/0/0", list[bool]()

    def look(view: View, _delta: Delta) -> None:
        seen.extend(info.cordoned for info in view.replicas.values() if info.status is ReplicaStatus.UP)

    with stage(server.endpoint) as replica, OmniCoordClientForHub(server.endpoint, on_view=look) as hub:
        replica.wait_registered(10.0)
        etcdctl(server.endpoint, "put", key, '{"weight": 2}')
        wait_for("the weight", lambda: has(hub, cordoned=False, weight=2.0))
        server.kill()
        shutil.copytree(tmp_path / "data", tmp_path / "copy")
        server.start()
        etcdctl(server.endpoint, "put", key, '{"weight": 2, "cordon": true}')
        for number in range(30):
            etcdctl(server.endpoint, "put", f"/elsewhere/{number}", "")
        wait_for("the cordon", lambda: has(hub, cordoned=True, weight=2.0))
        seen.clear()
        server.kill()
        (tmp_path / "data").rename(tmp_path / "lost")
        if is_restored:
            (tmp_path / "copy").rename(tmp_path / "data")
        server.start()
        wait_for("the key", lambda: '"cordon":true' in etcdctl(server.endpoint, "get", "--print-value-only", key), 30.0)
        wait_for("the answer", lambda: hub.view().stale_since_s is None and has(hub, cordoned=True, weight=2.0), 30.0)
        # The copy holds the record, too, as it was before; the replica mends that.
        assert is_restored or all(seen)
        etcdctl(server.endpoint, "del", key)
        wait_for("the end of the cordon", lambda: has(hub, cordoned=False, weight=1.0), 30.0)


def has(hub: OmniCoordClientForHub, **fields: object) -> bool:
    """Whether the only replica of the hub's view has these fields."""
    infos = list(hub.view().replicas.values())
    return len(infos) == 1 and all(getattr(infos[0], name) == value for name, value in fields.items())


def test_a_replica_and_a_hub_may_start_before_etcd(tmp_path: Path) -> None:
    server = EtcdServer(tmp_path)
    with stage(server.endpoint) as replica, OmniCoordClientForHub(server.endpoint) as hub:
        time.sleep(1.0)
        server.start()
        assert replica.wait_registered(5.0)[0] == 0
        wait_for("the replica at the hub", lambda: is_fresh_with(hub, 0), timeout_s=5.0)
    server.kill()


def test_a_view_larger_than_grpc_allows_by_default_is_read(endpoint: str, namespace: str) -> None:
    """8 MB in one list and in one catching-up watch; gRPC's own limit is 4."""

    async def scene() -> None:
        kv = EtcdKV(endpoint)
        prefix = f"/omni/v1/{namespace}/"
        start = (await kv.list(prefix)).revision + 1
        await asyncio.gather(*(kv.put(f"{prefix}{number:04d}", b"x" * 20_000) for number in range(400)))
        assert len((await kv.list(prefix)).items) == 400
        seen = 0
        async with contextlib.aclosing(kv.watch(prefix, start)) as batches, asyncio.timeout(10.0):
            async for batch in batches:
                seen += len(batch.events)
                if seen == 400:
                    break
        await kv.close()

    asyncio.run(scene())


async def test_calls_that_are_broken_off_never_look_like_a_cancellation(server: EtcdServer) -> None:
    """etcd is killed and restarted under many writers; each call ends well or by one of our own errors."""
    kv = EtcdKV(server.endpoint, try_timeout_s=0.5, call_timeout_s=1.0)
    stop = asyncio.Event()

    async def write(number: int) -> int:
        written = 0
        while not stop.is_set():
            try:
                await kv.put(f"/writers/{number}", str(written).encode())
                written += 1
            except RegistryError:
                await asyncio.sleep(0.05)
        return written

    writers = [asyncio.create_task(write(number)) for number in range(8)]
    for _ in range(2):
        await asyncio.sleep(0.4)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
    await asyncio.sleep(0.5)
    closing = asyncio.create_task(kv.close())
    stop.set()
    assert all([await writer for writer in writers])
    await closing


async def test_a_kv_made_on_another_loop_is_refused_clearly(endpoint: str) -> None:
    kv = EtcdKV(endpoint)
    with pytest.raises(RuntimeError, match="belongs to the event loop"):
        await asyncio.to_thread(asyncio.run, kv.get("/"))
    await kv.close()


def test_an_embedded_etcd_that_dies_is_started_anew_and_filled_again() -> None:
    with EmbeddedEtcd() as etcd, stage(etcd.endpoint) as replica, OmniCoordClientForHub(etcd.endpoint) as hub:
        replica.wait_registered(10.0)
        first_pid, first_cluster = etcd.pid, wait_for("the first list", lambda: hub.view().cluster_id)
        os.kill(first_pid, signal.SIGKILL)
        wait_for(
            "the replica in the new store",
            lambda: is_fresh_with(hub, 0) and hub.view().cluster_id != first_cluster,
            timeout_s=10.0,
        )
        assert etcd.pid not in (0, first_pid)
