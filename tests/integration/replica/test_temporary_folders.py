"""Temporary files of replicas: other users can't foresee, hold or plant them, and nothing is left of them."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from omni_discovery.deploy.document import DeployConfig, decode_deploy
from tests.support.other_user import NOBODY, as_ordinary_user, require_root
from tests.support.replica_hub import eventually
from tests.support.replica_stage import STARTUP_S, Deployment, is_running, kill

MODEL = "somebody/model"
PAINTER = Path(__file__).resolve().parents[3] / "stage_runtime" / "demo" / "painter"
#: A stage whose replicas are spawned, and one whose replicas are forks of a process that has a folder, too.
ECHO = {"engine": "echo", "final_output": "text"}
DIFFUSION = {"engine": "diffusion", "model": str(PAINTER), "final_output": "image"}


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder as /tmp is, which all processes of the test take for it."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("XDG_RUNTIME_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    yield folder
    shutil.rmtree(folder)


def document(stage: dict[str, Any]) -> DeployConfig:
    return decode_deploy(msgspec.json.encode({"stages": [{"stage_id": 0, **stage}]}), "test")


def folders(shared: Path) -> set[Path]:
    return set(shared.glob("omni-tmp-*"))


@pytest.mark.attack("E10")
def test_what_another_user_put_into_tmp_is_neither_loaded_nor_waited_for(
    endpoint: str, namespace: str, tmp_path: Path, shared: Path
) -> None:
    """1. nobody makes torch's cache, and vLLM's lock of a model, which is held; vLLM's cache belongs to nobody, too
    2. the replica's process uses a folder of its own, keeps compiled code in the user's, and takes the lock
    """
    require_root()
    (tmp_path / "cache" / "vllm").mkdir(parents=True)
    os.chown(tmp_path / "cache" / "vllm", NOBODY, -1)
    lock = shared / f"{hashlib.sha256(MODEL.replace('/', '-').encode()).hexdigest()}{MODEL.replace('/', '-')}.lock"

    def plant() -> None:
        (shared / "torchinductor_root").mkdir()
        (shared / "torchinductor_root" / "planted.so").touch()
        lock.touch(0o666)

    as_ordinary_user(plant)
    args = {"target": "tests.support.temporary_callables:used", "device": "cpu"}
    stage = {"engine": "torch", "engine_args": args, "final_output": "text"}
    with lock.open("rb") as held, Deployment(endpoint, namespace, document(stage), tmp_path) as deployment:
        assert held.fileno() > 0
        assert lock.stat().st_uid == NOBODY
        fcntl.flock(held, fcntl.LOCK_EX)
        deployment.start()
        # It imports vLLM and torch's compiler.
        (replica,) = deployment.wait_up(timeout_s=300.0)
        hub = deployment.session(replica)
        hub.submit("r", inputs={"prompt": ""})
        hub.acknowledged()
        chunks, done, _ = hub.collect("r")
        assert done.finish_reason == "stop"
        used = json.loads("".join(chunk.text for chunk in chunks))
        (own,) = folders(shared)
        assert used["temporary"] == str(own)
        assert stat.S_IMODE(own.stat().st_mode) == 0o700
        assert own.stat().st_uid == os.getuid()
        assert Path(used["lock"]).parent == own
        assert used["vllm"] == str(own / "vllm")
        assert [used["torch"], used["triton"]] == [
            str(tmp_path / "cache" / "omni" / name) for name in ("torchinductor", "triton")
        ]


@pytest.mark.attack("E10")
@pytest.mark.parametrize(("stage", "count"), [(ECHO, 1), (DIFFUSION, 2)], ids=["spawned", "forked"])
def test_the_folder_goes_with_its_process_however_that_ends(
    endpoint: str, namespace: str, tmp_path: Path, shared: Path, stage: dict[str, Any], count: int
) -> None:
    """1. the replica is killed: its folder goes, and the next one has another
    2. the supervisor is killed, and everything with it: the next supervisor removes what is left
    3. SIGTERM: nothing is left
    """
    with Deployment(endpoint, namespace, document(stage), tmp_path) as deployment:
        killed = deployment.start()
        (replica,) = deployment.wait_up()
        first = folders(shared)
        assert len(first) == count
        kill(replica.pid)
        assert eventually(lambda: len(first - folders(shared)) == 1 and len(folders(shared)) == count, STARTUP_S)
        # Not the record of the killed one.
        ended = replica.pid
        assert eventually(lambda: {each.pid for each in deployment.replicas()} - {ended}, STARTUP_S)
        replica = next(each for each in deployment.replicas() if each.pid != ended)
        second = folders(shared)
        kill(killed.pid)
        killed.wait()
        assert eventually(lambda: not is_running(replica.pid), STARTUP_S)
        again = deployment.start()
        is_tidy = eventually(lambda: not second & folders(shared) and len(folders(shared)) == count, STARTUP_S)
        assert is_tidy, f"{second} {folders(shared)}\n{deployment.log(1).read_text()[-4000:]}"
        again.send_signal(signal.SIGTERM)
        assert again.wait(STARTUP_S) == 0
        assert folders(shared) == set()
