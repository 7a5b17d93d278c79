"""Replicas that are forks of one process with the imports behind it: deaths of each of them."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from omni_discovery.deploy.document import decode_deploy
from omni_discovery.records.schema import ReplicaInfo
from tests.support.quiet import soon_s
from tests.support.replica_hub import eventually
from tests.support.replica_stage import STARTUP_S, Deployment, is_running, kill

PAINTER = Path(__file__).resolve().parents[3] / "stage_runtime" / "demo" / "painter"


@pytest.fixture
def deployment(endpoint: str, namespace: str, tmp_path: Path) -> Iterator[Deployment]:
    stage = {"stage_id": 0, "engine": "diffusion", "model": str(PAINTER), "final_output": "image"}
    deploy = decode_deploy(msgspec.json.encode({"stages": [stage]}), "test")
    with Deployment(endpoint, namespace, deploy, tmp_path) as running:
        yield running


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def serves(deployment: Deployment, replica: ReplicaInfo) -> bool:
    hub = deployment.session(replica)
    hub.submit("r", inputs={"prompt_token_ids": [3, 4, 1]}, params={"steps": 2})
    hub.acknowledged()
    _, done, attachments = hub.collect("r")
    return bool(done.finish_reason == "stop" and attachments[0].startswith(b"\x89PNG"))


def new_lives(deployment: Deployment, old: set[int], count: int) -> bool:
    return len({replica.pid for replica in deployment.replicas()} - old) >= count


def test_replicas_are_forks_of_one_zygote_and_each_is_its_own(deployment: Deployment) -> None:
    """1. two replicas of one parent, with different keys and ports; both draw
    2. one is killed: it comes back, from the same parent; the other is not touched
    3. SIGTERM drains both and leaves nothing
    """
    supervisor = deployment.start(0, 2)
    first, second = deployment.wait_up(0, 2)
    zygote = parent_of(first.pid)
    assert parent_of(second.pid) == zygote != supervisor.pid
    assert first.curve_public_key != second.curve_public_key
    assert serves(deployment, first)
    assert serves(deployment, second)
    kill(first.pid)
    assert eventually(lambda: new_lives(deployment, {first.pid, second.pid}, 1), STARTUP_S)
    assert second.pid in {replica.pid for replica in deployment.replicas()}
    assert {parent_of(info.pid) for info in deployment.replicas() if info.pid != first.pid} == {zygote}
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(15) == 0
    assert eventually(lambda: not is_running(zygote))


def test_a_killed_zygote_takes_its_replicas_along_and_another_one_brings_them_back(deployment: Deployment) -> None:
    deployment.start(0, 2)
    old = {replica.pid for replica in deployment.wait_up(0, 2)}
    kill(parent_of(min(old)))
    assert eventually(lambda: not any(is_running(pid) for pid in old))
    assert eventually(lambda: new_lives(deployment, old, 2), STARTUP_S)


def test_a_killed_supervisor_leaves_neither_zygote_nor_replica(deployment: Deployment) -> None:
    supervisor = deployment.start(0, 2)
    pids = [replica.pid for replica in deployment.wait_up(0, 2)]
    pids.append(parent_of(pids[0]))
    kill(supervisor.pid)
    assert eventually(lambda: not any(is_running(pid) for pid in pids))


def test_a_stop_while_the_zygote_imports_does_not_wait_for_it(deployment: Deployment) -> None:
    supervisor = deployment.start(0, 2)
    assert eventually(lambda: "supervisor.starting" in deployment.log().read_text(), STARTUP_S)
    asked_s = time.monotonic()
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(15) == 0
    assert time.monotonic() - asked_s < soon_s(5.0)


def test_a_model_folder_without_a_model_ends_the_supervisor_with_the_reason(
    endpoint: str, namespace: str, tmp_path: Path
) -> None:
    """1. the folder is there, so both replicas are started; 2. loading finds nothing in it; 3. no restart, exit 2."""
    (tmp_path / "empty").mkdir()
    stage = {"stage_id": 0, "engine": "diffusion", "model": str(tmp_path / "empty"), "final_output": "image"}
    deploy = decode_deploy(msgspec.json.encode({"stages": [stage]}), "test")
    with Deployment(endpoint, namespace, deploy, tmp_path) as deployment:
        assert deployment.start(0, 2).wait(STARTUP_S) == 2
        log = deployment.log().read_text()
    assert "no painter" in log
    assert log.count("supervisor.starting") == 1
