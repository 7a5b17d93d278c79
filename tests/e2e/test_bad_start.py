"""Starting it wrongly: one clear line that says what to do, and the right exit code."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
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


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("engine: echo, engine_args: {capcity: 2}", "did you mean 'capacity'"),
        ("engine: torch, engine_args: {target: 'os.path:nothing'}", "there is no 'nothing' in posixpath"),
    ],
    ids=["by the supervisor", "by a replica"],
)
def test_what_only_another_process_finds(tmp_path: Path, engine: str, said: str) -> None:
    """The hub's last line says which stage it was and where to look, and the line that it points to is there."""
    file = tmp_path / "d.yaml"
    file.write_text(f"stages: [{{stage_id: 0, {engine}, final_output: text}}]")
    child = Child(["serve", "--deploy-config", str(file), "--port", "0"], tmp_path)
    try:
        assert child.process.wait(60) == 2, child.text
    finally:
        assert child.stop() == []
    *above, last = child.text.strip().splitlines()
    pointed = re.fullmatch(r"omni: stage 0 can't run here: the line '(.*) \.\.\.' above says why; .*", last)
    assert pointed, last
    (line,) = [line for line in above if pointed[1] in line]
    assert said in line
    assert "Traceback" not in child.text


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("no_such_module:f", "can't be imported: No module named 'no_such_module'"),
        ("os.path:nothing", "there is no 'nothing' in posixpath"),
        ("os:sep", "'os:sep' is of type str, which can't be called"),
        ("os.path:join", "; give it one parameter annotated 'YourInput'"),
        ("fractions:Fraction, kwargs: {half: 1}", "engine_args.kwargs do not fit 'fractions:Fraction'"),
    ],
)
def test_a_dry_run_refuses_a_target_that_cannot_work(tmp_path: Path, target: str, said: str) -> None:
    file = tmp_path / "d.yaml"
    name, _, kwargs = target.partition(",")
    arguments = f"target: '{name}'" + (f",{kwargs}" if kwargs else "")
    file.write_text(f"stages: [{{stage_id: 0, engine: torch, engine_args: {{{arguments}}}, final_output: text}}]")
    fails(tmp_path, ["serve", "--dry-run", "--deploy-config", str(file)], 2, "stage 0: engine_args.", said)


#: Python reads it at every start, here with one package taken away.
WITHOUT_NUMPY = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "numpy":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


@pytest.fixture
def no_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(WITHOUT_NUMPY)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    )


@pytest.mark.usefixtures("no_numpy")
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_a_missing_package_is_one_line_in_every_mode(tmp_path: Path, pair: str, dry: list[str]) -> None:
    """In the hub's process, in a headless supervisor's, and in a supervisor's that is started by itself."""
    pip = "pip install 'omni-discovery[stage]'"
    with_hub = ["serve", "--deploy-config", pair, "--port", "0", *dry]
    fails(tmp_path, with_hub, 2, f"omni: stage 0: engine 'echo' needs the package 'numpy': {pip}")
    assert not (tmp_path / "omni.log").read_text().count("hub.listening")
    headless = ["--stage-id", "1", "--etcd-endpoints", "127.0.0.1:1"]
    every = f"omni: stage 1: every engine needs the package 'numpy': {pip}"
    fails(tmp_path, ["serve", "--headless", *headless, *dry], 2, every)
    if not dry:
        command = [sys.executable, "-m", "stage_runtime", *headless]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert (ended.returncode, ended.stderr.splitlines()[-1]) == (2, every), ended.stderr
        assert "Traceback" not in ended.stderr


@pytest.mark.usefixtures("no_numpy")
def test_a_hub_without_stages_of_its_own_needs_no_package_of_theirs(tmp_path: Path, pair: str) -> None:
    child = Child(["serve", "--deploy-config", pair, "--port", "0", "--hub-only", "--dry-run"], tmp_path)
    try:
        assert child.process.wait(60) == 0, child.text
    finally:
        assert child.stop() == []


@pytest.mark.parametrize("name", ["hub.py", "hub/__init__.py"])
def test_what_hides_the_hub_is_named_by_its_path(tmp_path: Path, pair: str, name: str) -> None:
    """It is not run, either: the command starts in that folder, which Python looks through first."""
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("print('RUN')")
    shadow = file if file.name == "hub.py" else file.parent
    fails(tmp_path, ["serve", "--deploy-config", pair], 2, f"{shadow} hides omni-discovery's package 'hub'", "rename")
    assert "RUN" not in (tmp_path / "omni.log").read_text()


def test_errors_of_a_deploy_file_come_at_once_with_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "d.yaml"
    stage = "stages: [{stage_id: 0, engine: echo, final_output: text}]"
    file.write_text(f"{stage}\nmodel: ${{NAME}}\nmodel: m\nwrong: 1\n")
    fails(tmp_path, ["serve", "--deploy-config", str(file)], 2, f"{file}:4: wrong is not known")
    said = (tmp_path / "omni.log").read_text()
    assert f"{file}:2: model: ${{NAME}} is not expanded" in said
    assert f"{file}:3: model: the key is in line 2 already" in said


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
