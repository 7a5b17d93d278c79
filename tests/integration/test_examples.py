"""The packages of docs/examples: built, installed into a folder of their own, run over their tests, used by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hub import Hub
from tests.support.processes import wait_for

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
KINDS = ("engine", "balancer", "connector", "command")
#: As compose/setup_venv.py has put it beside the interpreter; it builds them without downloading anything.
UV = [sys.executable, "-m", "uv"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that they are installed into, which all processes started meanwhile can import from."""
    folder = tmp_path_factory.mktemp("examples")
    target = folder / "target"
    where = ["--offline", "--no-deps", "--cache-dir", str(folder / "cache"), "--python", sys.executable]
    sources = [str(EXAMPLES / kind) for kind in KINDS]
    command = [*UV, "pip", "install", "--quiet", *where, "--target", str(target), *sources]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(target), *filter(None, [os.environ.get("PYTHONPATH")])]))
        yield target


def omni(*words: str) -> str:
    command = [sys.executable, "-m", "omni_discovery", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_an_examples_own_tests_pass(installed: Path, kind: str) -> None:
    """With what is installed, and with none of the settings of this project."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", "."]
    ended = subprocess.run(
        [*command, str(EXAMPLES / kind)], cwd=installed, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " passed" in ended.stdout


def test_the_engine_answers_and_the_policy_chooses_and_the_command_counts(installed: Path, tmp_path: Path) -> None:
    """1. two replicas of the engine behind a hub that picks by the policy; the command prints the slots of both
    2. the second replica is stopped: no answer waits for it, as each is picked from the first
    """
    document = """
    stages: [{stage_id: 0, engine: reverse, final_output: text, runtime: {num_replicas: 2}}]
    """
    hub = Hub.of_yaml(tmp_path, document, "--omni-lb-policy", "packed")
    try:
        hub.wait_ready()
        assert "print how many more requests each stage can run now" in omni("--help")
        registry = ["--etcd-endpoints", hub.endpoint, "--namespace", hub.namespace]
        wait_for("both replicas", lambda: omni("free", *registry) == "stage 0: 8 free\n")
        (second,) = (record["pid"] for record in hub.replicas("--etcd-endpoints", hub.endpoint) if record["replica_id"])
        os.kill(second, signal.SIGSTOP)
        try:
            for _ in range(8):
                status, body = hub.ask("do you hear me")
                assert status == 200, body
                assert body["choices"][0]["message"]["content"] == "me hear you do"
        finally:
            os.kill(second, signal.SIGCONT)
    finally:
        left = hub.stop()
    assert left == [], hub.text[-3000:]


def test_the_connector_carries_hand_offs_between_two_stages(installed: Path, tmp_path: Path) -> None:
    """Named by itself at the edge, where it is installed, with its settings on the spot."""
    shared = tmp_path / "shared"
    shared.mkdir()
    document = f"""
    stages:
      - {{stage_id: 0, engine: echo}}
      - {{stage_id: 1, engine: echo, final_output: text}}
    edges: [{{from: 0, to: 1, connector: {{name: FolderConnector, extra: {{folder: {shared}}}}}}}]
    """
    hub = Hub.of_yaml(tmp_path, document)
    try:
        hub.wait_ready()
        for number in range(3):
            status, body = hub.ask(f"hand me over {number}")
            assert status == 200, body
            assert body["choices"][0]["message"]["content"] == f"hand me over {number}"
    finally:
        left = hub.stop()
    assert left == [], hub.text[-3000:]
    done = [line for line in hub.text.splitlines() if "payload.closed edge=0-1 connector=FolderConnector" in line]
    assert len(done) == 2, hub.text[-3000:]
    assert any("puts=3" in line for line in done)
    assert any("gets=3" in line for line in done)
    assert list(shared.iterdir()) == []
