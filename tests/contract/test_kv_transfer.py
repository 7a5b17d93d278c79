"""KV that goes over the network from one engine to another; `make engines` runs it where NIXL is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from omni_discovery.deploy.document import StageConfig
from stage_runtime.supervisor.environment import replica_environment, stage_environment
from tests.support.prefill_decode import PROMPTS, stage

pytest.importorskip("nixl", reason="NIXL is not installed")
pytestmark = pytest.mark.vllm

#: UCX over TCP on this machine alone.
LOOPBACK = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}


def start(role: str, folder: Path) -> subprocess.Popen[bytes]:
    """A stage's process, in the environment that its supervisor would give it."""
    config = StageConfig(**stage(0, kv_transfer_config={"kv_connector": "NixlConnector"}))
    settings = stage_environment(config, True, "127.0.0.1")
    environment = {**replica_environment(dict(os.environ), config, settings, 1, 0), **LOOPBACK, "PYTHONSAFEPATH": ""}
    command = [sys.executable, "-m", "tests.support.kv_stage", role, "NixlConnector", str(folder)]
    with (folder / f"{role}.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def test_kv_that_nixl_carries_gives_the_tokens_of_one_stage(tmp_path: Path) -> None:
    """1. a prefill engine hands over where its KV is; a decode engine in another process fetches it and answers
    2. the tokens are those of one engine that does both
    3. the prefill engine lets go of what was fetched, long before it would give it up
    4. a decode engine that is told of a prefill engine which is gone reads the prompts itself, and says the same
    """
    processes = {role: start(role, tmp_path) for role in ("prefill", "decode")}
    try:
        codes = {role: process.wait(300) for role, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    said = {role: (tmp_path / f"{role}.log").read_text()[-2000:] for role in processes}
    assert codes == {"prefill": 0, "decode": 0}, said
    assert start("alone", tmp_path).wait(300) == 0, (tmp_path / "alone.log").read_text()[-2000:]
    for index in range(len(PROMPTS)):
        params = read(tmp_path, f"handed-{index}")["kv_transfer_params"]
        assert params["remote_host"] == "127.0.0.1"
        assert read(tmp_path, f"decode-{index}") == read(tmp_path, f"alone-{index}")
    assert read(tmp_path, "holds") is False

    later = tmp_path / "later"
    later.mkdir()
    for index in range(len(PROMPTS)):
        shutil.copy(tmp_path / f"handed-{index}", later)
    assert start("decode", later).wait(300) == 0, (later / "decode.log").read_text()[-2000:]
    for index in range(len(PROMPTS)):
        assert read(later, f"decode-{index}") == read(tmp_path, f"alone-{index}")
