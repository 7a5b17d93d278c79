"""``Omni`` as a batch user has it: a program of its own, with the echo engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hub.omni import Omni
from omni_discovery.deploy.document import parse_deploy
from omni_discovery.errors import ConfigError, RequestError, StageUnavailableError
from omni_discovery.etcd.embedded_file import read_embedded
from tests.support.hub import ECHO_PAIR
from tests.support.processes import DEFAULTS, alive, descendants, wait_for

pytestmark = pytest.mark.e2e

BATCH = """
from hub.omni import Omni

if __name__ == "__main__":
    with Omni("deploy.yaml", ["--namespace", "batch"], max_concurrency=8) as omni:
        results = omni.generate([f"prompt {n}" for n in range(40)] + [None], [{"max_tokens": 1}, None])
        print([result.text for result in results[:40]] == ["prompt "] * 40)
        print(all(result.images[0].startswith(b"\\x89PNG") for result in results[:40]))
        print(type(results[40].error).__name__)
        print(omni.generate("alone", modalities=["text"], use_tqdm=False)[0].text)
        try:
            omni.generate(["x"], [{}, {}, {}])
        except ValueError as error:
            print(error)
"""
ENDLESS = """
import os, signal, threading
from hub.omni import Omni

if __name__ == "__main__":
    omni = Omni("deploy.yaml", ["--namespace", "endless"])
    print("ready", flush=True)
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        omni.generate(["word " * 100_000] * 4, use_tqdm=False, modalities=["text"])
    except KeyboardInterrupt:
        print("interrupted", omni.generate(["done"], use_tqdm=False, modalities=["text"])[0].text)
    omni.close()
"""


def start(folder: Path, program: str, deploy: str) -> subprocess.Popen[str]:
    (folder / "deploy.yaml").write_text(deploy)
    (folder / "batch.py").write_text(program)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "XDG_STATE_HOME": str(folder / "state")}
    for name in DEFAULTS:
        environment.pop(name, None)
    with (folder / "errors").open("w") as errors:
        return subprocess.Popen(
            [sys.executable, "batch.py"], cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=errors
        )


def test_a_batch_gets_its_results_in_order_behind_a_progress_bar(tmp_path: Path) -> None:
    program = start(tmp_path, BATCH, ECHO_PAIR)
    said, _ = program.communicate(timeout=120)
    errors = (tmp_path / "errors").read_text()
    assert program.returncode == 0, errors[-3000:]
    assert said.splitlines() == [
        "True",
        "True",
        "InvalidRequestError",
        "alone",
        "'sampling_params_list' has 3 entries; the pipeline has 2 stages",
    ]
    assert "41/41" in errors


def test_ctrl_c_aborts_all_that_runs_and_leaves_a_hub_that_serves_on(tmp_path: Path) -> None:
    """1. four endless requests fill the only replica of text
    2. SIGINT comes: KeyboardInterrupt goes up, and the replica is free for the next request
    3. closing leaves no process
    """
    deploy = ECHO_PAIR.replace("num_replicas: 2", "num_replicas: 1").replace(
        "capacity: 8", "capacity: 4, delay_s: 0.01"
    )
    program = start(tmp_path, ENDLESS, deploy)
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n", (tmp_path / "errors").read_text()[-3000:]
        tree = descendants(program.pid)
        said, _ = program.communicate(timeout=60)
    finally:
        program.kill()
    assert program.returncode == 0, (tmp_path / "errors").read_text()[-3000:]
    assert said.splitlines() == ["interrupted done"]
    assert len(tree) >= 6
    wait_for("no process to be left", lambda: not alive(tree) or None, 20)


@pytest.fixture
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("OMNI_ETCD_ENDPOINTS", raising=False)


@pytest.mark.usefixtures("own_folders")
def test_a_stage_that_cant_run_is_told_at_once_and_leaves_nothing_behind() -> None:
    before = set(descendants(os.getpid()))
    with pytest.raises(ConfigError, match="stage 0 does not run here"):
        Omni(parse_deploy(ECHO_PAIR.replace("capacity", "capasity"), "bad.yaml"), ["--namespace", "bad"])
    wait_for("no process to be left", lambda: not alive(list(set(descendants(os.getpid())) - before)) or None, 20)


@pytest.mark.usefixtures("own_folders")
def test_a_pipeline_that_is_never_ready_is_told_after_the_time_given_for_it() -> None:
    with pytest.raises(StageUnavailableError, match="within 1 s"):
        Omni(parse_deploy(ECHO_PAIR, "pair.yaml"), ["--namespace", "empty", "--hub-only"], ready_timeout_s=1.0)


@pytest.mark.usefixtures("own_folders")
def test_replicas_that_run_elsewhere_serve_a_batch_and_a_closed_omni_says_so(tmp_path: Path) -> None:
    deploy = parse_deploy(ECHO_PAIR, "pair.yaml")
    with Omni(deploy, ["--namespace", "both"]) as here:
        etcd = read_embedded(tmp_path / "omni", "both")
        assert etcd is not None
        with Omni(deploy, ["--namespace", "both", "--etcd-endpoints", etcd.endpoint, "--hub-only"]) as there:
            assert there.generate(["from there"], modalities=["text"], use_tqdm=False)[0].text == "from there"
        there.close()
        with pytest.raises(RequestError, match="closed"):
            there.generate(["x"])
        assert here.generate(["from here"], modalities=["text"], use_tqdm=False)[0].text == "from here"


@pytest.mark.parametrize(
    ("flags", "said"),
    [(["--headless"], "omni serve"), (["--api", "vllm"], "omni serve"), (["--nonsense"], "--nonsense")],
)
def test_flags_that_make_no_sense_here_are_refused(flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Omni(parse_deploy(ECHO_PAIR, "pair.yaml"), flags)
    with pytest.raises(ConfigError, match="max_concurrency"):
        Omni(parse_deploy(ECHO_PAIR, "pair.yaml"), max_concurrency=0)
