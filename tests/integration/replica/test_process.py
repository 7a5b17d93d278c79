"""Supervisors and replicas as processes: drains, deaths, restarts, bad input."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omni_discovery import wire
from omni_discovery.records import keys
from omni_discovery.records.schema import ReplicaStatus
from omni_discovery.wire import FailureKind
from tests.support.processes import DEFAULTS
from tests.support.registry import etcdctl
from tests.support.replica_hub import RawHub, eventually
from tests.support.replica_stage import STARTUP_S, Deployment, echo_stages, is_running, kill

Deploy = Callable[..., Deployment]

SLOW = " ".join(["word"] * 1000)


@pytest.fixture
def deployed(endpoint: str, namespace: str, tmp_path: Path) -> Any:
    """Builds a deployment of echo stages in the test's own namespace."""
    made: list[Deployment] = []

    def build(*engine_args: dict[str, Any]) -> Deployment:
        made.append(Deployment(endpoint, namespace, echo_stages(*engine_args), tmp_path).__enter__())
        return made[-1]

    yield build
    for deployment in made:
        deployment.__exit__(None, None, None)


def end_of(hub: RawHub, timeout_s: float = 10.0) -> Any:
    """The message that ends the only request, its chunks skipped."""
    kinds = (wire.Chunk, wire.StageDone, wire.StageFailed)
    while isinstance(message := hub.receive(hub.output, kinds, timeout_s), wire.Chunk):
        continue
    return message


def test_sigterm_finishes_what_runs_takes_nothing_new_and_withdraws(deployed: Deploy) -> None:
    """1. a request of about a second runs; SIGTERM
    2. the record says draining, a new request is refused for that reason
    3. the old one comes to its end; the record goes; exit code 0
    """
    deployment = deployed({"delay_s": 0.02})
    supervisor = deployment.start()
    hub = deployment.session(deployment.wait_up()[0])
    hub.submit("old", " ".join(["word"] * 50))
    hub.acknowledged()
    supervisor.send_signal(signal.SIGTERM)
    assert eventually(lambda: len(deployment.replicas(0, ReplicaStatus.DRAINING)) == 1)
    hub.submit("new", "x")
    rejected = hub.acknowledged()
    assert isinstance(rejected, wire.Rejected)
    assert rejected.kind is FailureKind.DRAINING
    assert end_of(hub).finish_reason == "stop"
    assert supervisor.wait(10) == 0
    assert eventually(lambda: not deployment.client.view().replicas)


def test_a_drain_has_an_end_and_says_so_to_who_still_waits(deployed: Deploy) -> None:
    deployment = deployed({"delay_s": 0.05})
    supervisor = deployment.start(0, 1, "--drain-timeout", "0.5")
    hub = deployment.session(deployment.wait_up()[0])
    hub.submit("endless", SLOW)
    hub.acknowledged()
    supervisor.send_signal(signal.SIGTERM)
    assert end_of(hub).kind is FailureKind.DRAINING
    assert supervisor.wait(10) == 0


def test_a_second_sigterm_does_not_wait_for_what_runs(deployed: Deploy) -> None:
    deployment = deployed({"delay_s": 0.05})
    supervisor = deployment.start()
    hub = deployment.session(deployment.wait_up()[0])
    hub.submit("endless", SLOW)
    hub.acknowledged()
    supervisor.send_signal(signal.SIGTERM)
    assert eventually(lambda: len(deployment.replicas(0, ReplicaStatus.DRAINING)) == 1)
    supervisor.send_signal(signal.SIGTERM)
    assert end_of(hub).kind is FailureKind.DRAINING
    assert supervisor.wait(10) == 0


def test_a_killed_supervisor_takes_its_replicas_with_it(deployed: Deploy) -> None:
    deployment = deployed({})
    supervisor = deployment.start(0, 2)
    pids = [replica.pid for replica in deployment.wait_up(0, 2)]
    assert all(is_running(pid) for pid in pids)
    kill(supervisor.pid)
    assert eventually(lambda: not any(is_running(pid) for pid in pids))


def test_a_supervisor_whose_parent_is_gone_drains(deployed: Deploy) -> None:
    """1. a parent starts a supervisor with its own id and dies by kill -9; 2. the replica withdraws in order."""
    deployment = deployed({})
    program = f"""
        import os, subprocess, sys, time
        subprocess.Popen([sys.executable, "-m", "stage_runtime", "--stage-id", "0", "--etcd-endpoints",
            {deployment.endpoint!r}, "--namespace", {deployment.namespace!r}, "--parent-pid", str(os.getpid())],
            stderr=open({str(deployment.log())!r}, "wb"))
        time.sleep(60)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    deployment.supervisors.append(parent)
    (replica,) = deployment.wait_up()
    kill(parent.pid)
    assert eventually(lambda: not deployment.client.view().replicas, 10.0)
    assert eventually(lambda: not is_running(replica.pid))
    assert "supervisor.orphaned" in deployment.log().read_text()


def test_a_killed_replica_comes_back_as_another_life(deployed: Deploy) -> None:
    """1. two replicas, one is killed; 2. the other serves on; 3. the dead one is started anew, with a new epoch."""
    deployment = deployed({})
    deployment.start(0, 2)
    first, other = deployment.wait_up(0, 2)
    kill(first.pid)
    hub = deployment.session(other)
    hub.submit("r", "still here")
    assert end_of(hub).finish_reason == "stop"
    assert eventually(lambda: _lives(deployment) - {first.pid, other.pid} != set(), STARTUP_S)
    assert other.pid in _lives(deployment)
    assert eventually(lambda: first.epoch not in {replica.epoch for replica in deployment.replicas()}, 10.0)


def _lives(deployment: Deployment) -> set[int]:
    return {replica.pid for replica in deployment.replicas()}


def test_a_dead_engine_is_said_to_everyone_and_started_anew(deployed: Deploy) -> None:
    """1. a request makes the engine raise while another one runs: both are told
    2. the process ends and a new one takes over
    """
    deployment = deployed({"delay_s": 0.02, "crash_on": "CRASH"})
    deployment.start()
    (replica,) = deployment.wait_up()
    hub = deployment.session(replica)
    hub.submit("innocent", SLOW)
    hub.acknowledged()
    hub.submit("guilty", "CRASH")
    ends: dict[str, Any] = {}
    while len(ends) < 2:
        end = end_of(hub)
        ends[end.request_id] = end
    assert {end.kind for end in ends.values()} == {FailureKind.ENGINE}
    assert eventually(lambda: _lives(deployment) - {replica.pid} != set(), STARTUP_S)
    assert "the echo engine was told to crash" in deployment.log().read_text()


def test_a_hanging_engine_is_reported_loses_its_lease_and_is_started_anew(deployed: Deploy) -> None:
    """1. a request makes the engine stand still: alive, but not able
    2. the record says error and why
    3. after three times that bound the process ends; another life is up, the old record goes with its lease
    """
    deployment = deployed({"hang_on": "HANG"})
    deployment.start(0, 1, "--stall-after", "1")
    (replica,) = deployment.wait_up()
    hub = deployment.session(replica)
    hub.submit("r", "HANG")
    hub.acknowledged()
    assert eventually(lambda: len(deployment.replicas(0, ReplicaStatus.ERROR)) == 1, 5.0)
    assert "no progress" in deployment.replicas(0, ReplicaStatus.ERROR)[0].reason
    assert eventually(lambda: _lives(deployment) - {replica.pid} != set(), STARTUP_S)
    assert not is_running(replica.pid)
    assert eventually(
        lambda: {info.pid for info in deployment.client.view().replicas.values()} == _lives(deployment), 15.0
    )


def test_an_abort_is_acknowledged_when_the_engine_has_let_go_and_never_by_one_that_hangs(deployed: Deploy) -> None:
    """1. a request runs and is aborted: its end comes, then the acknowledgement
    2. another makes the engine stand still: its abort, though repeated, is not acknowledged, and neither is that of one
       behind it; one of a request that is not there is
    """
    deployment = deployed({"delay_s": 0.02, "hang_on": "HANG"})
    deployment.start(0, 1, "--stall-after", "60")
    (replica,) = deployment.wait_up()
    hub = deployment.session(replica)
    hub.submit("runs", SLOW)
    hub.acknowledged()
    hub.send(wire.Abort(epoch=hub.epoch, request_id="runs"))
    assert hub.receive(hub.input, wire.Aborted, 30.0).running
    assert end_of(hub).finish_reason == "abort"
    for name in ("HANG", "behind it"):
        hub.submit(name, name)
        hub.acknowledged()
    # By then the engine stands still: "behind it" would have its first word.
    with pytest.raises(TimeoutError):
        hub.receive(hub.output, wire.Chunk, 2.0)
    for name in ("HANG", "behind it", "HANG", "unknown"):
        hub.send(wire.Abort(epoch=hub.epoch, request_id=name))
    assert hub.receive(hub.input, wire.Aborted, 30.0).request_id == "unknown"
    with pytest.raises(TimeoutError):
        hub.receive(hub.input, wire.Aborted, 1.0)


def test_a_deleted_key_is_put_back_and_what_runs_goes_on(deployed: Deploy) -> None:
    """1. a request runs; somebody deletes the replica's key with etcdctl
    2. the key is back under a new epoch, the process is the same
    3. the request ends as if nothing had happened, and its frames name the life that it began in
    """
    deployment = deployed({"delay_s": 0.02})
    deployment.start()
    (replica,) = deployment.wait_up()
    hub = deployment.session(replica)
    hub.submit("r", " ".join(["word"] * 150))
    hub.acknowledged()
    etcdctl(deployment.endpoint, "del", keys.replica_key(deployment.namespace, 0, replica.replica_id))
    assert eventually(lambda: any(info.epoch > replica.epoch for info in deployment.replicas()), 10.0)
    (again,) = deployment.replicas()
    assert again.pid == replica.pid
    chunks, done, _ = hub.collect("r")
    assert (len(chunks), done.finish_reason, done.epoch) == (150, "stop", replica.epoch)
    hub.epoch = again.epoch
    hub.submit("r2", "x")
    assert isinstance(hub.acknowledged(), wire.Accepted)


def test_a_hub_that_withdraws_keeps_its_session_but_opens_no_new_one(deployed: Deploy) -> None:
    """1. a hub has a session; its key goes from the registry; 2. the session lives on; 3. a new one is refused."""
    deployment = deployed({})
    deployment.start()
    (replica,) = deployment.wait_up()
    hub = deployment.session(replica)
    deployment.client.close()
    try:
        listing = ["get", "--prefix", "--keys-only", keys.hubs_prefix(deployment.namespace)]
        assert eventually(lambda: not etcdctl(deployment.endpoint, *listing).strip())
        time.sleep(0.3)
        hub.submit("r", "x")
        assert isinstance(hub.acknowledged(), wire.Accepted)
        second = deployment.hub(replica)
        second.input.send(wire.encode(wire.Hello(hub_id="hub-1", epoch=replica.epoch)))
        assert second.hears_nothing(0.7)
    finally:
        deployment.client = _Closed()  # type: ignore[assignment]


class _Closed:
    def close(self) -> None:
        """The test has closed it already."""


def run_once(*flags: str) -> subprocess.CompletedProcess[str]:
    """The supervisor as a user who made a mistake would run it."""
    environment = {name: value for name, value in os.environ.items() if name not in DEFAULTS}
    command = [sys.executable, "-m", "stage_runtime", *flags, "--allow", "all"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)


def complaint(ended: subprocess.CompletedProcess[str]) -> str:
    """The one line that it ended with."""
    lines = ended.stderr.strip().splitlines()
    complaints = [line for line in lines if line.startswith("omni: ")]
    assert "Traceback" not in ended.stderr
    assert complaints == lines[-1:], ended.stderr
    return complaints[0]


def test_a_stage_that_is_not_in_the_pipeline_is_refused_with_those_that_are(deployed: Deploy) -> None:
    deployment = deployed({}, {})
    flags = ["--etcd-endpoints", deployment.endpoint, "--namespace", deployment.namespace]
    ended = run_once("--stage-id", "7", *flags)
    assert ended.returncode == 2
    assert "stage 7 is not in the pipeline; it has 0, 1" in complaint(ended)


def test_no_etcd_named_is_refused_with_the_flag_that_names_one() -> None:
    ended = run_once("--stage-id", "0")
    assert ended.returncode == 2
    assert "--etcd-endpoints" in complaint(ended)


def test_values_that_are_impossible_are_refused() -> None:
    for flags in (
        ["--omni-dp-size-local", "0"],
        ["--namespace", "a/b"],
        ["--omni-heartbeat-timeout", "0"],
        ["--etcd-endpoints", "nonsense"],
    ):
        ended = run_once("--stage-id", "0", "--etcd-endpoints", "127.0.0.1:1", *flags)
        assert ended.returncode == 2, flags
        assert complaint(ended)


def test_arguments_of_an_engine_that_are_wrong_end_the_supervisor_before_it_starts_any(deployed: Deploy) -> None:
    deployment = deployed({"delay": 1})
    flags = ["--etcd-endpoints", deployment.endpoint, "--namespace", deployment.namespace]
    ended = run_once("--stage-id", "0", *flags)
    assert ended.returncode == 2
    assert "engine_args.delay is not known; did you mean 'delay_s'?" in complaint(ended)
