"""Drains that hubs acknowledge: what they wait for, what they don't, and that nothing is lost on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omni_discovery import wire
from omni_discovery.clients import OmniCoordClientForHub
from omni_discovery.curve import KeyPair
from omni_discovery.records import keys
from omni_discovery.records.schema import HubRecord, ReplicaInfo, ReplicaStatus, encode_record
from omni_discovery.view.hub_watcher import ViewOptions
from omni_discovery.wire import FailureKind
from tests.support.quiet import soon_s
from tests.support.registry import EtcdServer, etcdctl
from tests.support.replica_hub import eventually
from tests.support.replica_stage import Deployment, echo_stages

SLOW = " ".join(["word"] * 1000)


@pytest.fixture
def deployment(endpoint: str, namespace: str, tmp_path: Path) -> Iterator[Deployment]:
    with Deployment(endpoint, namespace, echo_stages({"delay_s": 0.02}), tmp_path) as running:
        yield running


def ended_after_s(supervisor: subprocess.Popen[bytes], timeout_s: float) -> float:
    began_s = time.monotonic()
    assert supervisor.wait(timeout_s) == 0
    return time.monotonic() - began_s


class SlowHub:
    """A hub that takes in what the registry says only after ``lag_s``, and sends requests all the while."""

    def __init__(self, deployment: Deployment, hub_id: str, lag_s: float) -> None:
        self.keys = KeyPair.generate()
        self._lag_s = lag_s
        self._applied = 0
        self._may_send = threading.Event()
        self._may_send.set()
        self.client = OmniCoordClientForHub(
            deployment.endpoint,
            namespace=deployment.namespace,
            ttl_s=5.0,
            hub=HubRecord(hub_id=hub_id, curve_public_key=self.keys.public),
            options=ViewOptions(applied_revision=lambda: self._applied),
        )
        self._deployment, self._hub_id = deployment, hub_id
        self.answers: list[wire.Accepted | wire.Rejected] = []
        self.sent = 0
        self._thread = threading.Thread(target=self._send_all_the_time, daemon=True)

    def start(self, replica: ReplicaInfo) -> None:
        self._hub = self._deployment.hub(replica, self.keys, self._hub_id)
        self._hub.hello()
        self._thread.start()

    def _send_all_the_time(self) -> None:
        seen: list[tuple[float, int, bool]] = []
        while True:
            view, now_s = self.client.view(), time.monotonic()
            is_up = any(info.status is ReplicaStatus.UP for info in view.replicas.values())
            if not seen or seen[-1][1] != view.revision:
                seen.append((now_s, view.revision, is_up))
            for at_s, revision, was_up in seen:
                if now_s >= at_s + self._lag_s:
                    if not was_up:
                        # From here on it sends nothing, and only now it may say so.
                        self._applied = revision
                        return
                    self._applied = revision
            self.sent += 1
            self._hub.submit(f"{self._hub_id}-{self.sent}", "x")
            self.answers.append(self._hub.acknowledged())
            time.sleep(0.02)

    def close(self) -> None:
        self._thread.join(20.0)
        self.client.close()


def test_hubs_that_are_slow_to_know_lose_nothing_and_the_last_one_is_waited_for(deployment: Deployment) -> None:
    """1. two hubs send requests all the time; one takes two seconds to take in what the registry says
    2. SIGTERM: what they send is answered, with draining, until both have said that they know
    3. the replica ends soon after; no request is without an answer
    """
    hubs = [SlowHub(deployment, "quick", 0.0), SlowHub(deployment, "slow", 2.0)]
    supervisor = deployment.start()
    (replica,) = deployment.wait_up()
    assert eventually(lambda: all(hub.client.view().replicas for hub in hubs))
    time.sleep(0.5)
    for hub in hubs:
        hub.start(replica)
    assert eventually(lambda: all(len(hub.answers) > 5 for hub in hubs))
    supervisor.send_signal(signal.SIGTERM)
    took_s = ended_after_s(supervisor, 12.0)
    for hub in hubs:
        hub.close()
    assert 1.5 < took_s < soon_s(5.0)
    for hub in hubs:
        assert len(hub.answers) == hub.sent
        refused = [answer for answer in hub.answers if isinstance(answer, wire.Rejected)]
        assert {answer.kind for answer in refused} <= {FailureKind.DRAINING}
    assert any(isinstance(answer, wire.Rejected) for answer in hubs[1].answers)
    assert "drain.acknowledged" in deployment.log().read_text()
    assert "drain_unacknowledged" not in deployment.log().read_text()


def test_a_drain_with_nothing_to_wait_for_is_over_at_once(deployment: Deployment) -> None:
    supervisor = deployment.start()
    deployment.wait_up()
    time.sleep(1.0)
    supervisor.send_signal(signal.SIGTERM)
    assert ended_after_s(supervisor, 12.0) < soon_s(2.0)
    assert eventually(lambda: not deployment.client.view().replicas)


def hub_process(deployment: Deployment, ttl_s: float) -> subprocess.Popen[bytes]:
    """A registered hub in a process of its own."""
    program = f"""
        import time
        from omni_discovery.clients import OmniCoordClientForHub
        from omni_discovery.records.schema import HubRecord
        with OmniCoordClientForHub({deployment.endpoint!r}, namespace={deployment.namespace!r}, ttl_s={ttl_s},
                                   hub=HubRecord(hub_id="other")):
            time.sleep(120)
    """
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])


def registered_hubs(deployment: Deployment) -> set[str]:
    return set(deployment.client.view().hubs)


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_hub_that_is_stopped_or_dead_holds_a_drain_no_longer_than_its_lease(
    deployment: Deployment, how: signal.Signals
) -> None:
    other = hub_process(deployment, 2.0)
    try:
        supervisor = deployment.start()
        deployment.wait_up()
        assert eventually(lambda: registered_hubs(deployment) == {"hub-1", "other"}, 10.0)
        os.kill(other.pid, how)
        supervisor.send_signal(signal.SIGTERM)
        assert ended_after_s(supervisor, 12.0) < soon_s(5.0)
        assert registered_hubs(deployment) == {"hub-1"}
        assert "drain_unacknowledged" not in deployment.log().read_text()
    finally:
        other.kill()
        other.wait()


def test_a_hub_that_never_says_anything_is_named_when_the_bound_has_passed(deployment: Deployment) -> None:
    etcdctl(deployment.endpoint, "put", keys.hub_key(deployment.namespace, "mute"), '{"hub_id": "mute"}')
    supervisor = deployment.start(0, 1, "--drain-timeout", "1")
    deployment.wait_up()
    supervisor.send_signal(signal.SIGTERM)
    assert 0.9 < ended_after_s(supervisor, 12.0) < soon_s(4.0)
    assert "replica.drain_unacknowledged stage=0 hubs=mute" in deployment.log().read_text()


@pytest.mark.attack("H4")
def test_a_copy_of_a_hubs_record_is_not_waited_for_and_the_hub_is_served(deployment: Deployment) -> None:
    """1. records with the key of hub-1, without leases, lie before it and behind it: hub-1 is greeted and served
    2. SIGTERM: its acknowledgement is enough, though the bound of the drain would be a minute
    """
    for hub_id in ("aa", "zz"):
        copy = HubRecord(hub_id=hub_id, curve_public_key=deployment.keys.public)
        etcdctl(deployment.endpoint, "put", keys.hub_key(deployment.namespace, hub_id), encode_record(copy).decode())
    supervisor = deployment.start(0, 1, "--omni-heartbeat-timeout", "60")
    hub = deployment.session(deployment.wait_up()[0])
    hub.submit("r", "hello")
    hub.acknowledged(30.0)
    assert hub.collect("r", 30.0)[1].finish_reason == "stop"
    supervisor.send_signal(signal.SIGTERM)
    ended_after_s(supervisor, 45.0)
    log = deployment.log().read_text()
    assert "drain.acknowledged" in log
    assert "drain_unacknowledged" not in log


def test_a_revoked_hub_is_not_waited_for(deployment: Deployment) -> None:
    etcdctl(deployment.endpoint, "put", keys.hub_key(deployment.namespace, "mute"), '{"hub_id": "mute"}')
    etcdctl(deployment.endpoint, "put", keys.hub_control_key(deployment.namespace, "mute"), '{"revoked": true}')
    supervisor = deployment.start()
    deployment.wait_up()
    supervisor.send_signal(signal.SIGTERM)
    assert ended_after_s(supervisor, 12.0) < soon_s(4.0)
    assert "drain_unacknowledged" not in deployment.log().read_text()


def test_an_etcd_that_is_away_holds_a_drain_no_longer_than_a_lease_and_work_is_finished(
    server: EtcdServer, tmp_path: Path
) -> None:
    """1. a request of two seconds runs; etcd dies; SIGTERM
    2. the request comes to its end, and nobody can acknowledge: the replica ends by the bound, a TTL and 3 s
    """
    with Deployment(server.endpoint, "default", echo_stages({"delay_s": 0.02}), tmp_path) as deployment:
        supervisor = deployment.start(0, 1, "--omni-heartbeat-timeout", "2")
        hub = deployment.session(deployment.wait_up()[0])
        hub.submit("r", " ".join(["word"] * 100))
        hub.acknowledged()
        server.kill()
        supervisor.send_signal(signal.SIGTERM)
        chunks, done, _ = hub.collect("r")
        assert (len(chunks), done.finish_reason) == (100, "stop")
        # The rest is the withdrawal, which is tried for 3 s.
        assert ended_after_s(supervisor, 20.0) < soon_s(9.0)
        assert "replica.drain_unacknowledged stage=0 hubs=unknown" in deployment.log().read_text()


def test_signals_end_a_drain_by_the_key_the_second_one_at_once(deployment: Deployment) -> None:
    """1. drained by its key, with a request that takes long; 2. SIGTERM: it goes on; 3. again: it ends, and says so"""
    supervisor = deployment.start()
    hub = deployment.session(deployment.wait_up()[0])
    hub.submit("endless", SLOW)
    hub.acknowledged()
    etcdctl(deployment.endpoint, "put", keys.replica_control_key(deployment.namespace, 0, 0), '{"drain": true}')
    assert eventually(lambda: len(deployment.replicas(0, ReplicaStatus.DRAINING)) == 1)
    supervisor.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert supervisor.poll() is None
    supervisor.send_signal(signal.SIGTERM)
    assert _end_of(hub).kind is FailureKind.DRAINING
    assert ended_after_s(supervisor, 10.0) < soon_s(4.0)


def _end_of(hub: Any) -> Any:
    kinds = (wire.Chunk, wire.StageDone, wire.StageFailed)
    while isinstance(message := hub.receive(hub.output, kinds, 10.0), wire.Chunk):
        continue
    return message


def test_a_close_that_hangs_ends_the_process_with_the_code_of_its_real_end() -> None:
    program = """
        import logging, time
        from stage_runtime.replica.replica import exit_deadline
        logging.basicConfig()
        with exit_deadline(0.2, 3):
            time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert ended.returncode == 3
    assert "replica.close_hung after_s=0.2 code=3" in ended.stderr
