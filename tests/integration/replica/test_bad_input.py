"""Supervisors on machines that lack something, with models and devices that are not what was said: one clear line."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from omni_discovery.deploy.document import decode_deploy
from stage_runtime.supervisor.device_locks import DeviceLocks, Holder
from tests.support.processes import OMNI
from tests.support.replica_hub import eventually
from tests.support.replica_stage import STARTUP_S, Deployment, echo_stages, kill

PAINTER = Path(__file__).resolve().parents[3] / "stage_runtime" / "demo" / "painter"


def painter(folder: Path | str = PAINTER, **more: Any) -> dict[str, Any]:
    return {"stage_id": 0, "engine": "diffusion", "model": str(folder), "final_output": "image", **more}


@pytest.fixture
def deploy(endpoint: str, namespace: str, tmp_path: Path) -> Iterator[Any]:
    """Puts a document of these stages into the registry."""
    made: list[Deployment] = []

    def build(*stages: dict[str, Any]) -> Deployment:
        document = decode_deploy(msgspec.json.encode({"stages": stages}), "test")
        made.append(Deployment(endpoint, namespace, document, tmp_path).__enter__())
        return made[-1]

    yield build
    for deployment in made:
        deployment.__exit__(None, None, None)


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def refusal(deployment: Deployment, folder: Path, files: int | None = None, **shown: str) -> str:
    """What a supervisor says that ends with code 2 before it starts any replica."""

    def fewer_files() -> None:
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    flags = ["--etcd-endpoints", deployment.endpoint, "--namespace", deployment.namespace]
    environment = {name: value for name, value in os.environ.items() if not name.endswith("VISIBLE_DEVICES")}
    ended = subprocess.run(
        [sys.executable, "-m", "stage_runtime", "--stage-id", "0", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment | shown | {"XDG_RUNTIME_DIR": str(folder)},
        preexec_fn=fewer_files,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "supervisor.starting" not in ended.stderr
    return ended.stderr.strip().splitlines()[-1]


def test_a_device_that_is_not_there_is_refused_before_any_start(deploy: Any, tmp_path: Path) -> None:
    line = refusal(deploy(painter(runtime={"devices": "2"})), tmp_path, CUDA_VISIBLE_DEVICES="4,5")
    said = "omni: stage 0: there is no device 2 here: CUDA_VISIBLE_DEVICES='4,5' shows 2 devices, counted from 0"
    assert line.startswith(said)


def test_a_device_that_another_supervisor_uses_is_refused_with_its_process(deploy: Any, tmp_path: Path) -> None:
    """1. somebody of this user's holds the device; 2. the second supervisor says who, and ends"""
    deployment = deploy(painter(runtime={"devices": "GPU-0123abcd"}))
    holder = Holder(pid=os.getpid(), namespace=deployment.namespace, stage_id=0)
    first = DeviceLocks(tmp_path / "omni", ("GPU-0123abcd",), holder)
    first.acquire()
    try:
        line = refusal(deployment, tmp_path)
    finally:
        first.close()
    assert f"device GPU-0123abcd is in use by process {os.getpid()}, which runs stage 0" in line


def test_too_few_open_files_are_refused_with_the_number_that_would_do(deploy: Any, tmp_path: Path) -> None:
    line = refusal(deploy(painter()), tmp_path, files=100)
    assert "only 100 files may be open here, and a replica needs 256 at least" in line


def test_a_model_that_is_cut_short_ends_its_supervisor_and_nobody_else(deploy: Any, tmp_path: Path) -> None:
    """1. another stage serves; 2. the weights of this one are cut short: exit 2, one line without a traceback
    3. `omni history` knows why; the other stage serves on
    """
    shutil.copytree(PAINTER, tmp_path / "cut")
    (weights,) = (tmp_path / "cut").glob("*.safetensors")
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size // 2)
    echo = {"stage_id": 1, "engine": "echo", "final_output": "text", "input_from": []}
    deployment = deploy(painter(tmp_path / "cut"), echo)
    deployment.start(1)
    (other,) = deployment.wait_up(1)
    assert deployment.start(0).wait(STARTUP_S) == 2
    log = deployment.log(1).read_text()
    assert "Traceback" not in log
    assert "replica.misconfigured stage=0 reason=stage 0: " in log
    last = log.strip().splitlines()[-1]
    assert "supervisor.gave_up stage=0 replicas=0/0 code=2: its configuration is wrong: stage 0: " in last
    assert "model.safetensors is cut short" in last
    asked = ["history", "0/0", "--json", "--etcd-endpoints", deployment.endpoint, "--namespace", deployment.namespace]
    told = subprocess.run([*OMNI, *asked], capture_output=True, text=True, timeout=60, check=True).stdout
    assert "is cut short" in told
    hub = deployment.session(other)
    hub.submit("r", "hello")
    assert hub.collect("r")[1].finish_reason == "stop"


def test_a_log_that_can_not_be_written_costs_its_lines_only(endpoint: str, namespace: str, tmp_path: Path) -> None:
    """1. a supervisor whose standard error is a full disk; 2. it serves, and brings back what is killed
    3. SIGTERM drains it, with the exit code of a drain
    """
    with Deployment(endpoint, namespace, echo_stages({}), tmp_path) as deployment:
        deployment.log().symlink_to("/dev/full")
        supervisor = deployment.start()
        (info,) = deployment.wait_up()
        kill(info.pid)
        assert eventually(lambda: {each.pid for each in deployment.replicas()} - {info.pid} != set(), STARTUP_S)
        (again,) = [each for each in deployment.replicas() if each.pid != info.pid]
        hub = deployment.session(again)
        hub.submit("r", "hello")
        assert hub.collect("r")[1].finish_reason == "stop"
        supervisor.send_signal(signal.SIGTERM)
        assert supervisor.wait(15) == 0


@pytest.mark.attack("C4")
def test_a_replica_without_a_file_left_serves_who_is_there_and_others_again_later(
    endpoint: str, namespace: str, tmp_path: Path
) -> None:
    """1. a replica may open no more files: its session goes on, a new hub waits
    2. it may again: the new hub is served by the same process
    """
    with Deployment(endpoint, namespace, echo_stages({}), tmp_path) as deployment:
        deployment.start()
        (info,) = deployment.wait_up()
        hub = deployment.session(info)
        soft, hard = resource.prlimit(info.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(info.pid, resource.RLIMIT_NOFILE, (open_files(info.pid), hard))
        late = deployment.hub(info)
        hub.submit("r", "hello")
        assert hub.collect("r")[1].finish_reason == "stop"
        resource.prlimit(info.pid, resource.RLIMIT_NOFILE, (soft, hard))
        late.hello()
        late.submit("r2", "hello")
        assert late.collect("r2")[1].finish_reason == "stop"
        assert [each.pid for each in deployment.replicas()] == [info.pid]
