"""Replicas steered by hand: plain ``etcdctl put`` under their control keys, answered in their records."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omni_discovery import wire
from omni_discovery.clients import OmniCoordClientForStage
from omni_discovery.records import keys
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from tests.support.quiet import soon_s
from tests.support.registry import etcdctl
from tests.support.replica_hub import eventually
from tests.support.replica_stage import STARTUP_S, Deployment, echo_stages, is_running, kill

#: The promise is 200 ms; starting etcdctl itself is not counted, a busy machine is.
ACKNOWLEDGED_S = 0.2


@pytest.fixture
def deployment(endpoint: str, namespace: str, tmp_path: Path) -> Iterator[Deployment]:
    with Deployment(endpoint, namespace, echo_stages({"delay_s": 0.02}), tmp_path) as running:
        yield running


def put(deployment: Deployment, value: Any, replica_id: int = 0) -> int:
    """Write a control key; return its revision."""
    text = value if isinstance(value, str) else json.dumps(value)
    key = keys.replica_control_key(deployment.namespace, 0, replica_id)
    return int(json.loads(etcdctl(deployment.endpoint, "put", key, text, "-w", "json"))["header"]["revision"])


def control_key(deployment: Deployment, replica_id: int = 0) -> str:
    """What stands in the control key; empty if there is none."""
    key = keys.replica_control_key(deployment.namespace, 0, replica_id)
    return etcdctl(deployment.endpoint, "get", "--print-value-only", key).strip()


def delete(deployment: Deployment, replica_id: int = 0) -> None:
    etcdctl(deployment.endpoint, "del", keys.replica_control_key(deployment.namespace, 0, replica_id))


def record(deployment: Deployment, replica_id: int = 0) -> ReplicaInfo:
    return deployment.client.view().replicas[0, replica_id]


def end_of(hub: Any, timeout_s: float = 20.0) -> Any:
    kinds = (wire.Chunk, wire.StageDone, wire.StageFailed)
    while isinstance(message := hub.receive(hub.output, kinds, timeout_s), wire.Chunk):
        continue
    return message


def test_each_value_is_applied_and_answered_and_a_bad_one_is_answered_without_effect(deployment: Deployment) -> None:
    """1. cordon: the record says so with the key's revision, status stays up
    2. nonsense of three kinds: each is answered in control_error; the cordon stands
    3. weight: the cordon is gone, because the key says it no more, and the error too
    4. the key is deleted: nothing holds, revision 0 says so
    """
    deployment.start()
    deployment.wait_up()
    revision = put(deployment, {"cordon": True})
    assert eventually(lambda: record(deployment).control_revision == revision)
    assert (record(deployment).cordoned, record(deployment).status) == (True, ReplicaStatus.UP)
    assert not record(deployment).takes_new_work
    for nonsense, told in (("{cordon", "not JSON"), ({"cordn": False}, '"cordn"'), ({"weight": -1}, "0 to 1000")):
        bad = put(deployment, nonsense)
        assert eventually(lambda bad=bad: record(deployment).control_error.startswith(f"revision {bad}: "))  # type: ignore[misc]
        assert told in record(deployment).control_error
        assert (record(deployment).cordoned, record(deployment).control_revision) == (True, revision)
    revision = put(deployment, {"weight": 0.5})
    assert eventually(lambda: record(deployment).control_revision == revision)
    assert (record(deployment).cordoned, record(deployment).weight, record(deployment).control_error) == (
        False,
        0.5,
        "",
    )
    delete(deployment)
    assert eventually(lambda: record(deployment).control_revision == 0)
    assert (record(deployment).weight, record(deployment).control_error) == (1.0, "")


def test_the_answer_comes_in_time(deployment: Deployment) -> None:
    """Counted from the moment at which a watcher sees the key, to the one at which it sees the answer."""
    deployment.start()
    deployment.wait_up()
    took_s = []
    for number in range(5):
        began_s = time.monotonic()
        revision = put(deployment, {"weight": number + 1})
        written_s = time.monotonic()
        assert eventually(lambda revision=revision: record(deployment).control_revision == revision)  # type: ignore[misc]
        took_s.append(time.monotonic() - written_s)
        assert time.monotonic() - began_s < soon_s(5.0)
    assert sorted(took_s)[2] < ACKNOWLEDGED_S


def test_a_drain_finishes_what_runs_removes_its_key_withdraws_and_stays_down(deployment: Deployment) -> None:
    """1. two replicas; a request of two seconds runs on the first; drain, without an epoch
    2. the key gets the first's epoch; its record says draining; a new request is refused
    3. the request ends well; key and record are gone, and the process; nobody starts it again
    4. the other serves on; its supervisor ends with code 0 when told to
    """
    supervisor = deployment.start(0, 2, "--drain-timeout", "1")
    first, other = deployment.wait_up(0, 2)
    hub = deployment.session(first)
    hub.submit("long", " ".join(["word"] * 120))
    hub.acknowledged()
    put(deployment, {"drain": True}, first.replica_id)
    assert eventually(lambda: record(deployment, first.replica_id).status is ReplicaStatus.DRAINING)
    assert json.loads(control_key(deployment, first.replica_id)) == {"drain": True, "epoch": first.epoch}
    hub.submit("new", "x")
    assert isinstance(hub.acknowledged(), wire.Rejected)
    assert end_of(hub).finish_reason == "stop"
    assert eventually(lambda: not is_running(first.pid), 10.0)
    assert control_key(deployment, first.replica_id) == ""
    time.sleep(1.5)
    assert [info.pid for info in deployment.client.view().replicas.values()] == [other.pid]
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(10) == 0


def test_a_supervisor_whose_replicas_were_all_drained_ends_with_code_0(deployment: Deployment) -> None:
    supervisor = deployment.start()
    (replica,) = deployment.wait_up()
    put(deployment, {"drain": True, "epoch": replica.epoch, "cordon": True})
    assert supervisor.wait(15) == 0
    assert json.loads(control_key(deployment)) == {"cordon": True}


def test_a_drain_never_hits_the_next_life_of_the_id(deployment: Deployment) -> None:
    """1. a drain for an epoch that is not this one: answered, ignored
    2. the replica is drained by its own epoch while a request runs, and killed before it is done
    3. the life that follows it under the same id sees the key, says that it is another's, and serves
    """
    deployment.start()
    (replica,) = deployment.wait_up()
    put(deployment, {"drain": True, "epoch": replica.epoch + 1_000_000})
    assert eventually(lambda: "the drain is for epoch" in record(deployment).control_error)
    assert record(deployment).status is ReplicaStatus.UP
    hub = deployment.session(replica)
    hub.submit("long", " ".join(["word"] * 500))
    hub.acknowledged()
    put(deployment, {"drain": True})
    assert eventually(lambda: record(deployment).status is ReplicaStatus.DRAINING)
    kill(replica.pid)
    # The dead one's lease would hold its id for some seconds more.
    etcdctl(deployment.endpoint, "del", keys.replica_key(deployment.namespace, 0, 0))

    def next_life() -> bool:
        found = deployment.client.view().replicas.get((0, 0))
        return found is not None and found.epoch != replica.epoch and found.status is ReplicaStatus.UP

    assert eventually(next_life, STARTUP_S)
    assert eventually(lambda: f"the drain is for epoch {replica.epoch}" in record(deployment).control_error)


def test_whoever_has_a_cordoned_id_is_cordoned_from_its_first_moment(endpoint: str, namespace: str) -> None:
    """1. the id is cordoned while nobody has it
    2. a replica that says up at once takes it: no revision of its record is up and not cordoned
    """
    etcdctl(endpoint, "put", keys.replica_control_key(namespace, 0, 0), '{"cordon": true}')
    start = int(json.loads(etcdctl(endpoint, "get", "x", "-w", "json"))["header"]["revision"])
    with OmniCoordClientForStage(endpoint, "tcp://h:1", "tcp://h:2", 0, namespace=namespace) as client:
        client.wait_registered(5.0)
        key = keys.replica_key(namespace, 0, 0)
        last = int(json.loads(etcdctl(endpoint, "get", key, "-w", "json"))["kvs"][0]["mod_revision"])
        written = [
            etcdctl(endpoint, "get", "--print-value-only", f"--rev={rev}", key) for rev in range(start, last + 1)
        ]
    records = [json.loads(text) for text in written if text.strip()]
    assert records[-1]["status"] == "up"
    assert all(found["cordoned"] for found in records if found["status"] == "up")


def test_a_program_that_can_not_be_drained_by_key_says_so(endpoint: str, namespace: str) -> None:
    with OmniCoordClientForStage(endpoint, "tcp://h:1", "tcp://h:2", 0, namespace=namespace) as client:
        client.wait_registered(5.0)
        etcdctl(endpoint, "put", keys.replica_control_key(namespace, 0, 0), '{"drain": true}')
        key = keys.replica_key(namespace, 0, 0)
        assert eventually(
            lambda: (
                "can't be drained" in json.loads(etcdctl(endpoint, "get", "--print-value-only", key))["control_error"]
            )
        )
