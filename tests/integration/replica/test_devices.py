"""Which devices real replica processes are shown, as each of them says itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from omni_discovery.deploy.document import decode_deploy
from tests.support.replica_stage import Deployment

VARIABLE = "CUDA_VISIBLE_DEVICES"


def deployment(endpoint: str, namespace: str, folder: Path, **runtime: Any) -> Deployment:
    """One stage whose replicas say what a variable is in their process."""
    args = {"target": "tests.support.environment_callables:variable"}
    stage = {"stage_id": 0, "engine": "torch", "engine_args": args, "runtime": runtime, "final_output": "text"}
    return Deployment(endpoint, namespace, decode_deploy(msgspec.json.encode({"stages": [stage]}), "test"), folder)


def shown(deployed: Deployment, count: int) -> dict[str, str]:
    """What each of ``count`` replicas says it was shown, by what its record says."""
    said = {}
    for info in deployed.wait_up(count=count):
        hub = deployed.session(info)
        hub.submit("r", VARIABLE)
        said[info.device] = "".join(chunk.text for chunk in hub.collect("r")[0])
    return said


def test_replicas_of_a_stage_that_names_no_devices_share_out_what_their_supervisor_was_given(
    endpoint: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "4,5")
    with deployment(endpoint, namespace, tmp_path) as deployed:
        deployed.start(0, 2)
        assert shown(deployed, 2) == {"cuda:4": "4", "cuda:5": "5"}
        log = deployed.log().read_text()
    assert (
        "stage.devices stage 0: CUDA_VISIBLE_DEVICES='4,5' shows what its replicas use: one gets 4, one gets 5" in log
    )


def test_a_device_of_the_document_is_the_first_replica_s_and_the_next_replica_gets_the_next(
    endpoint: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. where the second device is absent, the error names how to share the first; 2. where it is there, it is used"""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with deployment(endpoint, namespace, tmp_path, devices="0") as deployed:
        monkeypatch.setenv(VARIABLE, "6")
        assert deployed.start(0, 2).wait(60) == 2
        last = deployed.log().read_text().splitlines()[-1]
        assert last.startswith("omni: stage 0: there is no device 1 here: CUDA_VISIBLE_DEVICES='6' shows 1 device")
        assert "runtime: {share_devices: true}" in last
        monkeypatch.setenv(VARIABLE, "6,7")
        deployed.start(0, 2)
        assert shown(deployed, 2) == {"cuda:6": "6", "cuda:7": "7"}


@pytest.mark.parametrize(
    ("shown_here", "first", "second"),
    [("4,5", "inherited: 4", "inherited: 5"), ("4,5,6,7", "inherited: 4,5", "inherited: 6,7")],
)
def test_a_dry_run_tells_what_is_inherited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown_here: str, first: str, second: str
) -> None:
    monkeypatch.setenv(VARIABLE, shown_here)
    ended = dry_run(tmp_path, replicas=2)
    assert ended.returncode == 0, ended.stderr
    lines = [" ".join(line.split()) for line in ended.stdout.splitlines()]
    assert f"0 0 {first} input, output, MASTER_PORT" in lines
    assert f"0 1 {second} input, output, MASTER_PORT" in lines
    assert f"CUDA_VISIBLE_DEVICES='{shown_here}' shows what its replicas use: one gets 4" in ended.stderr


def test_a_dry_run_where_no_device_is_shown_says_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    lines = [" ".join(line.split()) for line in dry_run(tmp_path, replicas=1).stdout.splitlines()]
    assert "0 0 CPU, none is shown here input, output, MASTER_PORT" in lines


def dry_run(folder: Path, replicas: int) -> subprocess.CompletedProcess[str]:
    stage = "{stage_id: 0, engine: torch, final_output: text, runtime: {num_replicas: %d}, engine_args: {target: %s}}"
    file = folder / "one.yaml"
    file.write_text(f"stages: [{stage % (replicas, 'tests.support.environment_callables:variable')}]")
    words = [sys.executable, "-m", "omni_discovery", "serve", "--dry-run", "--port", "0", "--deploy-config", str(file)]
    # Not where other programs of this user have said that they serve.
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, env=environment)
