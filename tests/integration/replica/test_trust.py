"""What a document in etcd may have done on a replica's host: real supervisors, and an etcd that anybody writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from omni_discovery.records.keys import pipeline_key
from tests.support.processes import Child, wait_for
from tests.support.registry import etcdctl
from tests.support.replica_hub import eventually
from tests.support.replica_stage import Deployment, echo_stages

REFUSED = "stage 0: the pipeline in etcd asks for what this host has not allowed: "
#: Wherever this module is imported, a file is left behind that says so.
MODULE = """
import pathlib, subprocess
import msgspec

pathlib.Path(__file__).with_name("imported").touch()

class Words(msgspec.Struct):
    prompt: str = ""

def shout(words: Words):
    return words.prompt.upper()
"""


def document(stage: Mapping[str, Any], **more: Any) -> str:
    return json.dumps({"stages": [{"stage_id": 0, "final_output": "text", **stage}], **more})


def runs_command(marker: Path) -> str:
    """A document whose target runs a command in place of a model."""
    args = {"target": "subprocess:call", "kwargs": {"args": ["touch", str(marker)]}}
    return document({"engine": "torch", "engine_args": args})


@pytest.fixture
def put(endpoint: str, namespace: str) -> Callable[[str], str]:
    return lambda content: etcdctl(endpoint, "put", pipeline_key(namespace), content)


@pytest.fixture
def module(tmp_path: Path) -> Path:
    """A folder with an importable module in it."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "trust_models.py").write_text(MODULE)
    return folder


def supervise(endpoint: str, namespace: str, folder: Path, *flags: str) -> tuple[int, str]:
    """A supervisor that has to end by itself: its exit code and what it printed."""
    command = [sys.executable, "-m", "stage_runtime", "--stage-id", "0", "--etcd-endpoints", endpoint]
    environment = {**os.environ, "PYTHONPATH": f"{folder / 'modules'}:{Path.cwd()}", "XDG_RUNTIME_DIR": str(folder)}
    command += ["--namespace", namespace, *flags]
    ended = subprocess.run(command, env=environment, cwd=folder, capture_output=True, timeout=60, check=False)
    return ended.returncode, ended.stderr.decode()


def vllm(model: str = "m", **engine_args: Any) -> dict[str, Any]:
    """A stage that its engine refuses, once it may be looked at."""
    return {"engine": "vllm", "model": model, "engine_args": {"handoff": {"nothing": 1}, **engine_args}}


@pytest.mark.attack("A3")
@pytest.mark.parametrize(
    ("stage", "key", "flag", "next_refusal"),
    [
        (
            {"engine": "torch", "engine_args": {"target": "trust_models:nothing"}},
            "engine_args.target",
            "--allow target=trust_models",
            "there is no 'nothing'",
        ),
        ({"engine": "theirs"}, "engine", "--allow engine=theirs", "engine 'theirs' is not known"),
        (vllm("/srv/m"), "model", "--model-root /srv/m", "handoff.nothing"),
        (vllm(trust_remote_code=True), "engine_args.trust_remote_code", "--allow remote-code", "handoff.nothing"),
        (vllm(load_format="pt"), "engine_args.load_format", "--allow pickled-weights", "handoff.nothing"),
        (vllm(worker_cls="a.B"), "engine_args.worker_cls", "--allow engine-arg=worker_cls", "handoff.nothing"),
        (vllm("s3://a/b"), "model", "--allow model=s3://a/b", "handoff.nothing"),
    ],
)
def test_a_headless_host_refuses_what_it_has_not_allowed(
    endpoint: str,
    namespace: str,
    tmp_path: Path,
    module: Path,
    put: Callable[[str], str],
    stage: dict[str, Any],
    key: str,
    flag: str,
    next_refusal: str,
) -> None:
    """One line, with the key and the flag; with that flag, the same stage comes as far as its engine."""
    put(document(stage))
    code, text = supervise(endpoint, namespace, tmp_path)
    (line,) = [line for line in text.splitlines() if "omni: " in line]
    assert code == 2
    assert line.startswith(f"omni: {REFUSED}{key} ")
    assert line.endswith(f"allow it here: {flag}")
    assert not (module / "imported").exists()
    code, text = supervise(endpoint, namespace, tmp_path, *flag.split())
    assert code == 2
    assert REFUSED not in text
    assert next_refusal in text


@pytest.mark.attack("D3")
def test_a_headless_host_opens_no_file_that_a_connectors_settings_name(
    endpoint: str, namespace: str, tmp_path: Path, put: Callable[[str], str]
) -> None:
    files = dict.fromkeys(("cert", "key", "ca"), str(tmp_path / "not-there"))
    connector = {"name": "TcpConnector", "extra": {"tls": files, "timeout_s": 5}}
    stages = [{"stage_id": 0, "engine": "echo"}, {"stage_id": 1, "engine": "echo", "final_output": "text"}]
    edges = [{"from": 0, "to": 1, "connector": "wire"}]
    put(json.dumps({"stages": stages, "connectors": {"wire": connector}, "edges": edges}))
    code, text = supervise(endpoint, namespace, tmp_path)
    (line,) = [line for line in text.splitlines() if "omni: " in line]
    flag = "--allow key=connectors.tls"
    assert code == 2
    assert line.startswith(f"omni: {REFUSED}connectors.tls of TcpConnector is this host's to decide")
    assert line.endswith(f"allow it here: {flag}")
    code, text = supervise(endpoint, namespace, tmp_path, *flag.split())
    assert code == 2
    assert REFUSED not in text
    assert "edge 0 to 1: tls: [Errno 2]" in text


def test_doctor_on_the_same_machine_tells_of_a_supervisor_that_has_ended(
    endpoint: str, namespace: str, tmp_path: Path, module: Path, put: Callable[[str], str]
) -> None:
    """1. a supervisor refuses the document and ends; 2. doctor says so, in few lines, and what is wrong comes last"""
    assert module.exists()
    put(document({"engine": "theirs"}))
    supervise(endpoint, namespace, tmp_path)
    command = [sys.executable, "-m", "omni_discovery", "doctor", "--etcd-endpoints", endpoint, "--namespace", namespace]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "COLUMNS": "200"}
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    lines = told.stdout.splitlines()
    (refused,) = [number for number, line in enumerate(lines) if "recent" in line and "supervisor stage 0" in line]
    assert "refused: stage 0: the pipeline in etcd asks for what this host has not allowed: engine" in lines[refused]
    grades = [line.split()[0] for line in lines if line.startswith(("ok ", "note ", "wrong "))]
    assert grades == sorted(grades, key=["ok", "note", "wrong"].index)
    assert lines[-1].strip().endswith("wrong")


@pytest.mark.attack("A3")
@pytest.mark.parametrize("target", ["trust_models:subprocess.call", "trust_models:shout.__globals__"])
def test_an_allowed_module_does_not_lend_what_it_has_imported(
    endpoint: str, namespace: str, tmp_path: Path, module: Path, put: Callable[[str], str], target: str
) -> None:
    put(document({"engine": "torch", "engine_args": {"target": target, "kwargs": {"args": ["id"]}}}))
    code, text = supervise(endpoint, namespace, tmp_path, "--allow", "target=trust_models")
    assert code == 2
    assert REFUSED in text
    assert "is of module 'subprocess'" in text or "is private" in text
    assert (module / "imported").exists()


def test_an_allowed_target_serves(
    endpoint: str,
    namespace: str,
    tmp_path: Path,
    module: Path,
    put: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{module}:{Path.cwd()}")
    monkeypatch.setenv("OMNI_ALLOW", "target=trust_models")
    with Deployment(endpoint, namespace, echo_stages({}), tmp_path, flags=()) as deployment:
        put(document({"engine": "torch", "engine_args": {"target": "trust_models:shout"}}))
        deployment.start()
        assert deployment.wait_up()


def examined(endpoint: str, namespace: str, folder: Path) -> str:
    """What ``omni doctor`` says; of a wait only once it has lasted for a moment."""
    doctor = Child(["doctor", "--etcd-endpoints", endpoint, "--namespace", namespace, "--json"], folder, "doctor")
    doctor.process.wait(60)
    return doctor.text


@pytest.mark.attack("A1", "A3")
def test_a_rewritten_document_runs_nothing_when_a_replica_starts_again(
    endpoint: str, namespace: str, tmp_path: Path, put: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. a headless host serves echo twice; somebody rewrites the document so that it runs a command
    2. one replica dies and is started again: the command does not run, the log and `omni doctor` say what was asked,
       and the other replica serves on
    """
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    marker = tmp_path / "marker"
    with Deployment(endpoint, namespace, echo_stages({}), tmp_path, flags=()) as deployment:
        supervisor = deployment.start(0, 2)
        first, second = deployment.wait_up(count=2)
        put(runs_command(marker))
        os.kill(first.pid, 9)
        assert eventually(lambda: "supervisor.not_kept_up" in deployment.log().read_text(), 30)
        assert f"{REFUSED}engine_args.target names code" in deployment.log().read_text()
        told = "--allow target=subprocess"
        wait_for("omni doctor to say it", lambda: told in examined(endpoint, namespace, tmp_path))
        assert supervisor.poll() is None
        assert second.pid in [each.pid for each in deployment.replicas()]
        assert not marker.exists()


@pytest.fixture
def hub(endpoint: str, namespace: str, tmp_path: Path, module: Path) -> Iterator[Child]:
    """A hub with a local replica, of a file of its own that names a target, on a host that allows nothing else."""
    file = tmp_path / "pipeline.yaml"
    file.write_text(document({"engine": "torch", "engine_args": {"target": "trust_models:shout"}}))
    flags = ["--deploy-config", str(file), "--etcd-endpoints", endpoint, "--namespace", namespace, "--port", "0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{module}:{Path.cwd()}")
        child = Child(["serve", *flags, "--omni-heartbeat-timeout", "5"], tmp_path)
    yield child
    assert child.stop() == []


@pytest.mark.attack("A1", "A3")
def test_the_hosts_own_file_is_trusted_and_what_takes_its_place_in_etcd_is_not(
    hub: Child, endpoint: str, namespace: str, tmp_path: Path, put: Callable[[str], str]
) -> None:
    """1. `omni serve` with a file that names a target: it runs, as ever
    2. another host that reads it from etcd refuses it
    3. the document is rewritten to run a command, and the local replica dies: nothing of it runs here, either
    """
    wait_for("the replica", lambda: hub.must_run() or "replica.ready" in hub.text)
    code, text = supervise(endpoint, namespace, tmp_path)
    assert code == 2
    assert "--allow target=trust_models" in text
    marker = tmp_path / "marker"
    put(runs_command(marker))
    records = etcdctl(endpoint, "get", "--prefix", "--print-value-only", f"/omni/v1/{namespace}/replicas/")
    os.kill(json.loads(records)["pid"], 9)
    wait_for("the refusal", lambda: hub.must_run() or REFUSED in hub.text)
    time.sleep(0.5)
    assert not marker.exists()


@pytest.mark.attack("A3")
def test_a_hub_that_joins_with_vllms_server_loads_no_code_of_a_model(
    endpoint: str, namespace: str, tmp_path: Path, put: Callable[[str], str]
) -> None:
    """It reads the model's config and tokenizer itself, by a document that is not its own."""
    put(document({"engine": "vllm", "model": "m", "engine_args": {"trust_remote_code": True}}))
    flags = ["--etcd-endpoints", endpoint, "--namespace", namespace, "--port", "0"]
    child = Child(["serve", "--hub-only", "--api", "vllm", *flags], tmp_path)
    assert child.process.wait(60) == 2
    assert "--allow remote-code" in child.text


@pytest.mark.attack("A3")
def test_a_dry_run_says_the_same_and_imports_nothing(
    endpoint: str, namespace: str, tmp_path: Path, module: Path, put: Callable[[str], str]
) -> None:
    put(document({"engine": "torch", "engine_args": {"target": "trust_models:shout"}}))
    flags = ["--etcd-endpoints", endpoint, "--namespace", namespace]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{module}:{Path.cwd()}")
        child = Child(["serve", "--headless", "--stage-id", "0", "--dry-run", *flags], tmp_path)
    assert child.process.wait(60) == 2
    assert REFUSED in child.text
    assert not (module / "imported").exists()
