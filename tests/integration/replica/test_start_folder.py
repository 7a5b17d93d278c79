"""The folder that ``omni serve`` is started in, where other users can write: nothing there is run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from omni_discovery.commands.registry import child_environment
from omni_discovery.deploy.document import StageConfig
from stage_runtime.supervisor.environment import placed_environment
from tests.support.other_user import NOBODY, require_root
from tests.support.processes import DEFAULTS, Child, wait_for

#: As users start it; "-m" would look through the folder of the start by itself.
OMNI = Path(sys.executable).with_name("omni")
PLANTED = ("msgspec", "logging", "stage_runtime", "hub", "zmq", "numpy", "multiprocessing")
SHOUT = """
import msgspec
import planted_helper

class Words(msgspec.Struct):
    prompt: str

def shout(words: Words):
    return words.prompt.upper()
"""


@pytest.fixture
def anybodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as /tmp is, with modules that leave a mark where they are imported."""
    folder = tmp_path / "anybodys"
    folder.mkdir()
    for name in PLANTED:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write('{name} ')\n")
    folder.chmod(0o1777)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    return folder


def deploy(folder: Path, stage: str) -> str:
    file = folder / "deploy.yaml"
    file.write_text(f"stages: [{{stage_id: 0, final_output: text, {stage}}}]")
    return str(file)


def dry_run(folder: Path, file: str, *flags: str) -> subprocess.CompletedProcess[str]:
    words = [str(OMNI), "serve", "--dry-run", "--port", "0", "--deploy-config", file, *flags]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.attack("K5")
def test_programs_that_opencv_starts_load_no_library_of_the_start_folder(
    anybodys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenCV, which vLLM imports, puts its folder and a colon before LD_LIBRARY_PATH; Python then runs `file`."""
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    seen, bin_folder = tmp_path / "seen", tmp_path / "bin"
    bin_folder.mkdir()
    program = bin_folder / "file"
    program.write_text(f'#!/bin/sh\necho "$LD_LIBRARY_PATH" > {seen}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
    stage = StageConfig(stage_id=0, engine="vllm", model="m")
    for environment in (child_environment(), placed_environment(dict(os.environ), stage, {}, 0)):
        seen.unlink(missing_ok=True)
        code = "import cv2, platform; platform.architecture()"
        subprocess.run([sys.executable, "-c", code], cwd=anybodys, env=environment, timeout=60, check=True)
        folders = seen.read_text().strip().split(":")
        assert any("cv2" in each for each in folders)
        assert all(each.startswith("/") for each in folders), folders


@pytest.mark.attack("K5")
def test_a_pipe_where_a_library_looks_for_settings_stops_no_import() -> None:
    """GnuTLS in PyAV's wheel looks in /tmp/vendor; here in a /tmp of the test's own."""
    require_root()
    code = "import av; print(av.codecs_available is not None)"
    script = """
mount -t tmpfs none /tmp && mkdir -p /tmp/vendor/etc/gnutls && mkfifo -m 666 /tmp/vendor/etc/gnutls/config && exec "$@"
"""
    words = ["unshare", "-m", "--propagation", "private", "sh", "-ec", script, "sh", sys.executable, "-P", "-c", code]
    done = subprocess.run(
        words, env=child_environment(), cwd="/", capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout.strip(), done.returncode) == ("True", 0), done.stderr


@pytest.mark.attack("D1")
def test_a_hub_its_supervisor_and_its_replica_import_nothing_that_others_put_there(
    anybodys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.processes.OMNI", [str(OMNI)])
    child = Child(
        ["serve", "--port", "0", "--deploy-config", deploy(tmp_path, "engine: echo")], anybodys, "log", tmp_path / "run"
    )
    try:
        wait_for("the replica", lambda: child.must_run() or "hub.ready" in child.text, 60.0)
    finally:
        assert child.stop() == []
    assert not (tmp_path / "imported").exists()


@pytest.mark.attack("D1")
def test_a_dry_run_imports_nothing_that_others_put_there(anybodys: Path, tmp_path: Path) -> None:
    done = dry_run(anybodys, deploy(tmp_path, "engine: echo"))
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "imported").exists()


@pytest.mark.attack("D1")
def test_a_target_is_found_in_a_folder_of_this_user_only(anybodys: Path, tmp_path: Path) -> None:
    """1. others can write there: refused, with the reason; 2. this user alone: found, and planted names come last"""
    for name, text in (("shouting", SHOUT), ("planted_helper", "")):
        (anybodys / f"{name}.py").write_text(text)
    file = deploy(tmp_path, "engine: torch, engine_args: {target: 'shouting:shout', device: cpu}")
    refused = dry_run(anybodys, file)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert "'shouting:shout' can't be imported: No module named 'shouting'; " in line
    assert line.endswith(f"nothing is imported from the folder {anybodys}: others can write to {anybodys}")
    anybodys.chmod(0o755)
    found = dry_run(anybodys, file)
    assert found.returncode == 0, found.stderr
    assert not (tmp_path / "imported").exists()


@pytest.mark.attack("F2")
def test_a_model_that_another_user_put_there_is_not_loaded(anybodys: Path, tmp_path: Path) -> None:
    """1. another user makes a folder that is called like the model: neither a plan nor a hub takes it
    2. with the full path of a folder below the shared one it is the same; 3. the operator may trust it by name
    """
    require_root()
    planted = anybodys / "acme/tiny"
    planted.mkdir(parents=True)
    for folder in (planted, planted.parent):
        os.chown(folder, NOBODY, NOBODY)
    (tmp_path / "deploys").mkdir()
    for model in ("acme/tiny", str(planted)):
        file = deploy(tmp_path / "deploys", f"engine: echo, model: {model}")
        refused = dry_run(anybodys, file)
        assert refused.returncode == 2
        (line,) = refused.stderr.splitlines()
        assert f"stage 0: the model {model} is a folder here, {planted}, and not for this user alone: " in line
        assert line.endswith(f"--model-root {planted}")
        words = [str(OMNI), "serve", "--port", "0", "--deploy-config", file]
        hub = subprocess.run(words, cwd=anybodys, capture_output=True, text=True, timeout=60, check=False)
        assert (hub.returncode, hub.stdout) == (2, "")
        assert "not for this user alone" in hub.stderr
        trusted = dry_run(anybodys, file, "--model-root", str(planted))
        assert trusted.returncode == 0, trusted.stderr


@pytest.mark.attack("F2")
def test_a_replica_with_a_name_on_a_model_hub_leaves_a_folder_where_others_could_still_make_one(
    anybodys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.processes.OMNI", [str(OMNI)])
    file = deploy(tmp_path, "engine: echo, model: acme/tiny")
    child = Child(["serve", "--port", "0", "--deploy-config", file], anybodys, "log", tmp_path / "run")
    try:
        wait_for("the replica", lambda: child.must_run() or "hub.ready" in child.text, 60.0)
        assert f"replica.left_folder folder={anybodys}" in child.text
        folders = {Path(f"/proc/{pid}/cwd").readlink() for pid in child.tree()}
        assert Path("/") in folders
    finally:
        assert child.stop() == []
