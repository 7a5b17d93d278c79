"""A stage whose replicas run in a Python of their own, which their host has to allow."""

from __future__ import annotations

import sysconfig
import venv
from pathlib import Path

import msgspec
import pytest

from omni_discovery.deploy.document import DeployConfig, StageConfig
from tests.support.processes import Child
from tests.support.replica_stage import Deployment, echo_stages

ALLOWED = ("--allow", "key=runtime.python")
_END_S = 60


def with_python(python: str) -> DeployConfig:
    deploy = echo_stages({})
    runtime = msgspec.structs.replace(deploy.stages[0].runtime, python=python)
    first: StageConfig = msgspec.structs.replace(deploy.stages[0], runtime=runtime)
    return msgspec.structs.replace(deploy, stages=(first, *deploy.stages[1:]))


def new_environment(folder: Path, *packages: str) -> str:
    """The Python of an environment that finds packages in these folders, and nowhere else."""
    venv.create(folder, symlinks=True)
    (library,) = folder.glob("lib/python3*/site-packages")
    (library / "tests.pth").write_text("\n".join(packages))
    return str(folder / "bin" / "python")


@pytest.fixture
def own(tmp_path: Path) -> str:
    """Another environment with all that a replica needs."""
    return new_environment(tmp_path / "own", sysconfig.get_path("purelib"), str(Path.cwd()))


def interpreter_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()


def test_replicas_run_in_the_python_that_their_stage_names(
    endpoint: str, namespace: str, tmp_path: Path, own: str
) -> None:
    with Deployment(endpoint, namespace, with_python(own), tmp_path, flags=()) as deployment:
        supervisor = deployment.start(0, 2, *ALLOWED)
        pids = [each.pid for each in deployment.wait_up(count=2)]
        assert [interpreter_of(pid) for pid in pids] == [own, own]
        assert interpreter_of(supervisor.pid) != own


def test_a_host_may_say_for_itself_which_python(endpoint: str, namespace: str, tmp_path: Path, own: str) -> None:
    """What stands in this host's own flags needs no further word of it."""
    with Deployment(endpoint, namespace, echo_stages({}), tmp_path, flags=()) as deployment:
        deployment.start(0, 1, "--stage-overrides", f'{{"0": {{"runtime": {{"python": "{own}"}}}}}}')
        assert [interpreter_of(each.pid) for each in deployment.wait_up()] == [own]


@pytest.mark.attack("A3")
def test_a_document_runs_no_program_that_the_host_has_not_allowed(
    endpoint: str, namespace: str, tmp_path: Path
) -> None:
    marker, program = tmp_path / "marker", tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {marker}\n")
    program.chmod(0o755)
    with Deployment(endpoint, namespace, with_python(str(program)), tmp_path, flags=()) as deployment:
        code = deployment.start().wait(_END_S)
        assert code == 2, deployment.log().read_text()
        said = deployment.log().read_text()
        assert f"runtime.python is a program of this host: '{program}'" in said
        assert "allow it here: --allow key=runtime.python" in said
        assert not marker.exists()


def test_what_is_missing_in_a_python_is_named(endpoint: str, namespace: str, tmp_path: Path) -> None:
    """1. an environment without this project says what to install where
    2. a path that leads nowhere says so
    """
    empty, gone = new_environment(tmp_path / "empty"), "/nowhere/python"
    wanted = {
        empty: ["lacks what a replica needs: ", "No module named", f"install it there: {empty} -m pip install"],
        gone: [f"stage 0: runtime.python {gone} can't be run: No such file or directory"],
    }
    for number, (python, told) in enumerate(wanted.items()):
        with Deployment(endpoint, f"{namespace}-{number}", with_python(python), tmp_path, flags=()) as deployment:
            assert deployment.start(0, 1, *ALLOWED).wait(_END_S) == 2
            said = deployment.log().read_text()
            assert [words for words in told if words not in said] == []


def test_a_dry_run_checks_the_stage_in_its_own_python(tmp_path: Path, own: str) -> None:
    """The hub's own Python need not have what the stage's engine needs."""
    empty = new_environment(tmp_path / "empty")
    for python, code, told in ((own, 0, "would be written"), (empty, 2, "No module named stage_runtime")):
        file = tmp_path / "pipeline.yaml"
        runtime = f"{{python: {python}}}"
        file.write_text(f"stages:\n  - {{stage_id: 0, engine: echo, final_output: text, runtime: {runtime}}}\n")
        child = Child(["serve", "--deploy-config", str(file), "--port", "0", "--dry-run"], tmp_path)
        assert child.process.wait(_END_S) == code, child.text
        assert told in child.text
        assert (f"  CPU      {python}  input, output" in child.text) is (python == own)
