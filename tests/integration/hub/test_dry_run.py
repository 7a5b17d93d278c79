"""``omni serve --dry-run``: the whole plan or the reason why not, with nothing started and nothing written."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from omni_discovery.commands.main import main
from omni_discovery.etcd.embedded import EmbeddedEtcd
from tests.support.processes import Child
from tests.support.registry import etcdctl, revision_of

PAIR = """
stages:
  - {stage_id: 0, engine: echo, engine_args: {capacity: 4}, runtime: {num_replicas: 2}, final_output: text}
  - {stage_id: 1, engine: echo, engine_args: {modality: image}, final_output: image}
edges: [{from: 0, to: 1, max_inflight: 8, async_chunk: true}]
"""
KEYS = "/omni/v1/default"


@pytest.fixture
def pair(tmp_path: Path) -> str:
    file = tmp_path / "pair.yaml"
    file.write_text(PAIR)
    return str(file)


def dry_run(folder: Path, *flags: str, code: int = 0) -> list[str]:
    """The lines of one dry run that has to end with ``code``."""
    child = Child(["serve", "--dry-run", *flags], folder)
    assert child.process.wait(60) == code, child.text
    assert "Traceback" not in child.text
    return child.text.splitlines()


def test_without_any_etcd_the_plan_is_told_and_nothing_is_left_behind(tmp_path: Path, pair: str) -> None:
    before = set(tmp_path.iterdir())
    here = ("--stage-overrides", '{"1": {"runtime": {"devices": "4711"}}}')
    lines = dry_run(tmp_path, "--deploy-config", pair, "--port", "0", "--omni-heartbeat-timeout", "7", *here)
    assert any("WARNING stage.devices stage 1: there is no device 4711 here" in line for line in lines)
    for told in (
        "  HTTP        127.0.0.1:<a free port>, the API of omni",
        "  etcd       one of our own, on a socket of this user",
        "  TTL        7 s; whether etcd grants it is asked at the start only",
        "  0   echo    -      the client  text    2",
        "  1      0  4711     input, output",
        "  0     1   AutoConnector  max_inflight=8  the first piece",
        f"  {KEYS}/replicas/0/<lowest free id>  leased  2 replica records",
    ):
        assert told in lines, "\n".join(lines)
    assert {path.name for path in set(tmp_path.iterdir()) - before} == {"omni.log"}


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ('{"0": {"runtime": {"devices": "0,1,2"}}}', "3 devices (0,1,2) can't be shared out evenly to 2 replicas"),
        ('{"0": {"engine_args": {"capacity": "x"}}}', "stage 0: engine_args: Expected `int`, got `str`"),
        (
            '{"0": {"engine": "torch", "engine_args": {"target": "tests.support.callables:nope", "capacity": 1}}}',
            "stage 0: engine_args.target 'tests.support.callables:nope'",
        ),
    ],
)
def test_a_plan_that_is_not_possible_ends_with_the_reason(
    tmp_path: Path, pair: str, overrides: str, reason: str
) -> None:
    lines = dry_run(tmp_path, "--deploy-config", pair, "--stage-overrides", overrides, code=2)
    assert reason in lines[-1]


def test_a_connector_that_can_not_be_built_here_is_told(tmp_path: Path, pair: str) -> None:
    file = tmp_path / "yuanrong.yaml"
    file.write_text(PAIR.replace("{from: 0, to: 1, ", "{from: 0, to: 1, connector: YuanrongTransferEngineConnector, "))
    lines = dry_run(tmp_path, "--deploy-config", str(file), code=2)
    assert lines[-1].startswith("omni: edge 0 to 1: ")
    assert "NPU" in lines[-1]


def test_a_port_that_is_taken_is_told(tmp_path: Path, pair: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        lines = dry_run(tmp_path, "--deploy-config", pair, "--hub-only", "--port", port, code=2)
    assert f"can't listen on 127.0.0.1 port {port}" in lines[-1]


def test_the_registry_is_read_and_not_written(
    tmp_path: Path, pair: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. in an empty namespace a hub would put its document, and replicas would wait for it
    2. with that in force, the plan of the replicas is known
    3. another document is refused with the difference, and no run has written anything
    """
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def run(*flags: str, code: int = 0) -> str:
        """What the command says, run in this process."""
        assert main([*flags, "--etcd-endpoints", etcd.endpoint]) == code
        said = capsys.readouterr()
        return said.out if code == 0 else said.err

    headless = ("--headless", "--stage-id", "0", "--stage-overrides", '{"0": {"devices": "0,1", "num_replicas": 2}}')
    with EmbeddedEtcd() as etcd:
        revision = revision_of(etcd.endpoint)
        assert "none is in force yet: ours would be put" in run(
            "serve", "--dry-run", "--port", "0", "--deploy-config", pair
        )
        assert "the replicas would wait" in run("serve", "--dry-run", *headless)
        assert revision_of(etcd.endpoint) == revision

        run("pipeline", "apply", pair)
        revision = revision_of(etcd.endpoint)
        plan = run("serve", "--dry-run", *headless).splitlines()
        assert "  0      1  1        input, output" in plan
        assert f"  {KEYS}/replicas/0/<lowest free id>  leased  2 replica records" in plan
        changed = ("--stage-overrides", '{"1": {"engine_args": {"capacity": 3}}}')
        told = run("serve", "--dry-run", "--port", "0", "--deploy-config", pair, *changed, code=2)
        assert "already runs another pipeline: stage 1.engine_args.capacity: 3 here" in told
        assert revision_of(etcd.endpoint) == revision
        assert etcdctl(etcd.endpoint, "get", "--prefix", "--keys-only", KEYS).split() == [f"{KEYS}/pipeline"]
