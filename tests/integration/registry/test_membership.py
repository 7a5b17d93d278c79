"""Replicas come, go, are meddled with, and hubs see it, on a real etcd."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from omni_discovery.clients import OmniCoordClientForHub, OmniCoordClientForStage
from omni_discovery.records import keys
from omni_discovery.records.schema import HubRecord, ReplicaStatus
from omni_discovery.view.table import Delta, View
from tests.support.processes import wait_for
from tests.support.quiet import soon_s
from tests.support.registry import etcdctl


def stage(endpoint: str, namespace: str, stage_id: int = 0, **options: Any) -> OmniCoordClientForStage:
    options = {"ttl_s": 2.0, **options}
    return OmniCoordClientForStage(endpoint, "tcp://h:1", "tcp://h:2", stage_id, namespace=namespace, **options)


@pytest.fixture
def hub(endpoint: str, namespace: str) -> Iterator[OmniCoordClientForHub]:
    with OmniCoordClientForHub(endpoint, namespace=namespace) as hub:
        hub.wait_synced(10.0)
        yield hub


def up_ids(hub: OmniCoordClientForHub, stage_id: int = 0) -> list[int]:
    return [info.replica_id for info in hub.get_replicas_for_stage(stage_id).replicas]


def test_a_replica_is_up_at_the_hub_without_a_further_call(
    endpoint: str, namespace: str, hub: OmniCoordClientForHub
) -> None:
    with stage(endpoint, namespace, fields={"host": "h", "capacity": 4}) as replica:
        replica_id, epoch = replica.wait_registered(10.0)
        wait_for("the replica at the hub", lambda: up_ids(hub) == [0])
        info = hub.get_replica_list().replicas[0]
        assert (info.replica_id, info.epoch, info.queue_length) == (replica_id, epoch, 0)
        assert (info.host, info.capacity, info.status) == ("h", 4, "up")
        assert info.registered_at == pytest.approx(time.time(), abs=10)
        assert hub.get_replica_list().timestamp >= info.registered_at


def test_status_and_load_keep_what_the_other_call_said(
    endpoint: str, namespace: str, hub: OmniCoordClientForHub
) -> None:
    with stage(endpoint, namespace) as replica:
        replica.wait_registered(10.0)
        replica.update_info(queue_length=7)
        replica.update_info(status=ReplicaStatus.DRAINING)
        replica.describe(phase="draining", reason="asked to")

        def seen() -> bool:
            info = hub.view().replicas.get((0, 0))
            return info is not None and (info.status, info.queue_length, info.phase) == ("draining", 7, "draining")

        wait_for("both at the hub", seen)
        assert hub.get_replica_list().replicas == []


def test_close_shows_down_and_the_key_is_gone_at_once(endpoint: str, namespace: str) -> None:
    """Long before the lease would have ended."""
    seen: list[str] = []

    def note(view: View, delta: Delta) -> None:
        seen.extend(info.status.value for info in delta.updated)
        seen.extend("gone" for _ in delta.removed)

    with OmniCoordClientForHub(endpoint, namespace=namespace, on_view=note) as hub:
        replica = stage(endpoint, namespace, ttl_s=60.0)
        replica.wait_registered(10.0)
        wait_for("it at the hub", lambda: len(hub.get_replica_list().replicas) == 1)
        replica.close()
        wait_for("the farewell", lambda: seen[-2:] == ["down", "gone"], timeout_s=4.0)


def test_sixteen_that_register_at_once_get_ids_0_to_15(endpoint: str, namespace: str) -> None:
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(16) as pool:
        replicas = list(pool.map(lambda _: stage(endpoint, namespace, ttl_s=10.0), range(16)))
        for replica in replicas:
            stack.enter_context(replica)
        registrations = [replica.wait_registered(20.0) for replica in replicas]
    assert sorted(replica_id for replica_id, _ in registrations) == list(range(16))
    assert len({epoch for _, epoch in registrations}) == 16


def test_a_freed_id_is_the_next_to_be_taken(endpoint: str, namespace: str, hub: OmniCoordClientForHub) -> None:
    with stage(endpoint, namespace) as first, stage(endpoint, namespace) as second:
        first_id, _ = first.wait_registered(10.0)
        second_id, _ = second.wait_registered(10.0)
        assert {first_id, second_id} == {0, 1}
        first.close()
        with stage(endpoint, namespace) as third:
            assert third.wait_registered(10.0)[0] == first_id
            wait_for("both at the hub", lambda: up_ids(hub) == [0, 1])


def test_a_key_deleted_by_hand_is_put_back_with_a_new_epoch(
    endpoint: str, namespace: str, hub: OmniCoordClientForHub
) -> None:
    lost: list[str] = []
    with stage(endpoint, namespace, ttl_s=30.0, on_lost=lost.append) as replica:
        _, epoch = replica.wait_registered(10.0)
        etcdctl(endpoint, "del", keys.replica_key(namespace, 0, 0))
        info = wait_for("a new life", lambda: _newer(hub, epoch), timeout_s=4.0)
        assert replica.wait_registered(2.0) == (0, info)
        assert lost == ["the key was deleted"]


def test_a_lease_revoked_by_hand_is_replaced(endpoint: str, namespace: str, hub: OmniCoordClientForHub) -> None:
    with stage(endpoint, namespace, ttl_s=30.0) as replica:
        _, epoch = replica.wait_registered(10.0)
        found = json.loads(etcdctl(endpoint, "get", keys.replica_key(namespace, 0, 0), "-w", "json"))
        etcdctl(endpoint, "lease", "revoke", f"{found['kvs'][0]['lease']:x}")
        wait_for("a new life", lambda: _newer(hub, epoch), timeout_s=4.0)
        assert replica.wait_registered(2.0)[0] == 0


def _newer(hub: OmniCoordClientForHub, epoch: int) -> int:
    info = hub.view().replicas.get((0, 0))
    return info.epoch if info is not None and info.epoch > epoch and info.status == "up" else 0


@pytest.mark.parametrize("nonsense", ["", "not json", '{"stage_id": 1e999}', "[" * 5000])
def test_nonsense_under_one_key_hides_that_one_only(
    endpoint: str, hub: OmniCoordClientForHub, namespace: str, nonsense: str
) -> None:
    with stage(endpoint, namespace) as replica:
        replica.wait_registered(10.0)
        etcdctl(endpoint, "put", keys.replica_key(namespace, 0, 7), nonsense)
        wait_for("the bad value", lambda: keys.replica_key(namespace, 0, 7) in hub.view().bad)
        assert up_ids(hub) == [0]
        etcdctl(endpoint, "del", keys.replica_key(namespace, 0, 7))
        wait_for("the bad value to go", lambda: not hub.view().bad)


def test_a_record_written_over_by_hand_is_restored_on_its_lease(
    endpoint: str, namespace: str, hub: OmniCoordClientForHub
) -> None:
    key = keys.replica_key(namespace, 0, 0)
    with stage(endpoint, namespace) as replica:
        replica.wait_registered(10.0)
        wait_for("the replica at the hub", lambda: up_ids(hub) == [0])
        etcdctl(endpoint, "put", key, "nonsense")
        wait_for("the record", lambda: up_ids(hub) == [0] and not hub.view().bad, timeout_s=3.0)
    wait_for("the key to be gone", lambda: up_ids(hub) == [], timeout_s=3.0)
    assert etcdctl(endpoint, "get", key) == ""


def test_a_neighbour_whose_name_begins_the_same_is_not_seen(
    endpoint: str, namespace: str, hub: OmniCoordClientForHub
) -> None:
    with stage(endpoint, namespace + "b") as other, stage(endpoint, namespace) as replica:
        other.wait_registered(10.0)
        replica.wait_registered(10.0)
        wait_for("the replica at the hub", lambda: up_ids(hub) == [0])
        assert len(hub.view().replicas) == 1


def test_replicas_see_hubs_come_and_go(endpoint: str, namespace: str) -> None:
    seen: list[list[str]] = []
    with stage(endpoint, namespace, on_hubs=lambda hubs: seen.append(sorted(hubs))):
        record = HubRecord(hub_id="h1", curve_public_key="k")
        with OmniCoordClientForHub(endpoint, namespace=namespace, ttl_s=30.0, hub=record) as hub:
            wait_for("the hub", lambda: seen[-1:] == [["h1"]])
            wait_for("the hub's own view", lambda: "h1" in hub.view().hubs)
        wait_for("the hub to go", lambda: seen[-1:] == [[]])


def test_the_first_pipeline_stands_and_the_second_is_told_of_it(
    endpoint: str, namespace: str, hub: OmniCoordClientForHub
) -> None:
    assert hub.get_pipeline() is None
    first, second = hub.create_pipeline(b"one"), hub.create_pipeline(b"two")
    assert (first.won, second.won) == (True, False)
    assert second.current is not None
    assert second.current.value == hub.get_pipeline() == b"one"
    wait_for("the pipeline in the view", lambda: hub.view().pipeline == b"one")


def _register_and_wait(endpoint: str, namespace: str, registered: Any) -> None:
    with stage(endpoint, namespace) as replica:
        registered.put(replica.wait_registered(10.0))
        signal.pause()


def test_a_killed_replica_is_gone_after_its_ttl(endpoint: str, namespace: str, hub: OmniCoordClientForHub) -> None:
    spawn = multiprocessing.get_context("spawn")
    registered = spawn.Queue()
    child = spawn.Process(target=_register_and_wait, args=(endpoint, namespace, registered))
    child.start()
    assert registered.get(timeout=20.0)[0] == 0
    wait_for("the replica at the hub", lambda: up_ids(hub) == [0])
    child.kill()
    child.join()
    killed_s = time.monotonic()
    wait_for("the key to end", lambda: not hub.view().replicas, timeout_s=5.0)
    assert time.monotonic() - killed_s < soon_s(3.5)


def test_a_busy_program_keeps_its_lease(endpoint: str, namespace: str) -> None:
    """The main thread holds on to the interpreter for longer than the TTL."""
    with stage(endpoint, namespace, ttl_s=1.0) as replica:
        before = replica.wait_registered(10.0)
        end_s = time.monotonic() + 2.5
        while time.monotonic() < end_s:
            sum(range(10_000))
        assert replica.wait_registered(0.1) == before


def test_a_proxy_in_the_environment_is_not_asked(
    endpoint: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with stage(endpoint, namespace) as replica:
        assert replica.wait_registered(5.0)[0] == 0


def test_a_dead_endpoint_beside_a_living_one_does_not_matter(endpoint: str, namespace: str) -> None:
    for _ in range(3):
        with stage(f"127.0.0.1:9,{endpoint}", namespace) as replica:
            assert replica.wait_registered(5.0)[0] == 0


def test_clients_leave_no_thread_behind(endpoint: str, namespace: str) -> None:
    with stage(endpoint, namespace) as replica, OmniCoordClientForHub(endpoint, namespace=namespace) as hub:
        replica.wait_registered(10.0)
        hub.wait_synced(10.0)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("omni-registry")]
