"""Starting it wrongly: one clear line that says what to do, and the right exit code."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.support.hub import ECHO_PAIR
from tests.support.processes import Child

pytestmark = pytest.mark.e2e


def fails(folder: Path, arguments: list[str], code: int, *said: str) -> None:
    """Run a command that must fail within a bound, with one last line that says all of ``said``."""
    child = Child(arguments, folder)
    try:
        assert child.process.wait(60) == code, child.text
    finally:
        assert child.stop() == []
    last = child.text.strip().splitlines()[-1]
    assert all(word in last for word in said), child.text
    assert "Traceback" not in child.text


@pytest.fixture
def pair(tmp_path: Path) -> str:
    file = tmp_path / "pair.yaml"
    file.write_text(ECHO_PAIR)
    return str(file)


def test_no_etcd_at_the_endpoints(tmp_path: Path, pair: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{unused.getsockname()[1]}"
        arguments = ["serve", "--deploy-config", pair, "--port", "0", "--etcd-endpoints", endpoint]
        fails(tmp_path, arguments, 1, "no etcd answered", endpoint, "--etcd-endpoints")


def test_a_port_in_use(tmp_path: Path, pair: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        fails(tmp_path, ["serve", "--deploy-config", pair, "--port", port], 2, port, "--port")


def test_a_missing_model_folder(tmp_path: Path) -> None:
    file = tmp_path / "d.yaml"
    file.write_text("stages: [{stage_id: 0, engine: vllm, model: ./nowhere, final_output: text}]")
    fails(tmp_path, ["serve", "--deploy-config", str(file), "--port", "0"], 2, "nowhere", "does not exist")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stages: [", "not YAML"),
        ("stages: []", "empty"),
        ("stages: [{stage_id: 0, engin: echo, final_output: text}]", "did you mean 'engine'"),
        ("stages: [{stage_id: 0, engine: echo}]", "final_output"),
    ],
)
def test_a_malformed_deploy_file(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "d.yaml"
    file.write_text(text)
    fails(tmp_path, ["serve", "--deploy-config", str(file), "--port", "0"], 2, str(file), said)


def test_an_unknown_engine(tmp_path: Path) -> None:
    file = tmp_path / "d.yaml"
    file.write_text("stages: [{stage_id: 0, engine: warp, final_output: text}]")
    child = Child(["serve", "--deploy-config", str(file), "--port", "0"], tmp_path)
    try:
        assert child.process.wait(60) == 2, child.text
    finally:
        assert child.stop() == []
    assert "'warp'" in child.text
    assert "echo" in child.text
    assert "Traceback" not in child.text


def test_what_only_a_supervisor_finds(tmp_path: Path) -> None:
    """The supervisor of the stage says why, and the hub's last line which stage it was and where to look."""
    file = tmp_path / "d.yaml"
    file.write_text("stages: [{stage_id: 0, engine: echo, engine_args: {capcity: 2}, final_output: text}]")
    child = Child(["serve", "--deploy-config", str(file), "--port", "0"], tmp_path)
    try:
        assert child.process.wait(60) == 2, child.text
    finally:
        assert child.stop() == []
    *_, said, last = [line for line in child.text.splitlines() if line.startswith("omni: ")]
    assert "did you mean 'capacity'" in said
    assert last == child.text.strip().splitlines()[-1]
    assert last.startswith("omni: stage 0 can't run here: the line 'omni: ...'")
    assert "Traceback" not in child.text


def test_a_missing_deploy_file(tmp_path: Path) -> None:
    fails(tmp_path, ["serve", "--deploy-config", "nothing.yaml"], 2, "can't read nothing.yaml")


def test_an_unknown_stage(tmp_path: Path, pair: str) -> None:
    fails(tmp_path, ["serve", "--deploy-config", pair, "--stage-id", "7"], 2, "stage 7", "0, 1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve"], "--deploy-config"),
        (["serve", "--headless"], "--stage-id"),
        (["serve", "--headless", "--stage-id", "0"], "--etcd-endpoints"),
        (["serve", "m", "--omni-dp-size-local", "2"], "--stage-id"),
        (["serve", "m", "--stage-id", "0", "--omni-dp-size-local", "0"], "at least 1"),
        (["serve", "m", "--omni-heartbeat-timeout", "-1"], "--omni-heartbeat-timeout"),
        (["serve", "m", "--namespace", "a/b"], "namespace"),
        (["serve", "m", "--omni-lb-policy", "luck"], "round-robin"),
        (["serve", "m", "--etcd-endpoints", "nonsense"], "host:port"),
        (["replicas"], "OMNI_ETCD_ENDPOINTS"),
    ],
)
def test_flags_that_do_not_go_together(tmp_path: Path, arguments: list[str], said: str) -> None:
    fails(tmp_path, arguments, 2, said)
