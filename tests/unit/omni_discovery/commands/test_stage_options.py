"""The settings of local replicas: what the flags mean, and how a child process gets them without showing them."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from hub.serve.flags import add_serve_options
from omni_discovery.commands.registry import child_environment, read_bounds
from omni_discovery.commands.stage_options import (
    StageOptions,
    open_config,
    read_config,
    read_stage_options,
    runtime_here,
    stage_command,
)
from omni_discovery.deploy.trust.bounds import Bounds
from omni_discovery.errors import ConfigError
from omni_discovery.etcd.config import RegistrySecurity
from stage_runtime.cli import build_parser
from stage_runtime.config import ReplicaConfig, replica_config
from tests.support.processes import wait_for

ROOT = Path(__file__).resolve().parents[4]
SECRET = "hush-hush"
OPTIONS = StageOptions(
    stage_id=1,
    count=3,
    endpoints="10.0.0.5:2379",
    namespace="team-a",
    security=RegistrySecurity(user="u", password=SECRET),
    ttl_s=5.0,
    replica_address="10.0.0.9",
    zmq_security="none",
    labels={"zone": "a", "rack": "7 b"},
    drain_timeout_s=7.125,
    stall_after_s=90.5,
    runtime={"devices": "0,1"},
    bounds=Bounds(
        allow=("target=my_models", "remote-code"),
        model_roots=("/no-such/models", "/no-such/cache", str(ROOT / "stage_runtime/demo")),
        named_roots=("/no-such/models",),
    ),
)
FLAGS = [
    *("--etcd-endpoints", "10.0.0.5:2379", "--namespace", "team-a", "--etcd-user", "u"),
    *("--omni-heartbeat-timeout", "5", "--omni-replica-address", "10.0.0.9", "--zmq-security", "none"),
    *("--label", "zone=a", "--label", "rack=7 b", "--drain-timeout", "7.125", "--stall-after", "90.5"),
    *("--allow", "target=my_models", "--allow", "remote-code", "--model-root", "/no-such/models"),
    *("--stage-id", "1", "--omni-dp-size-local", "3", "--stage-overrides", '{"1": {"devices": "0,1"}}'),
]


@pytest.mark.parametrize("program", ["omni serve", "stage_runtime"])
def test_both_programs_read_the_same_flags_alike(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_ETCD_PASSWORD", SECRET)
    monkeypatch.setenv("HF_HUB_CACHE", "/no-such/cache")
    parser = build_parser()
    if program == "omni serve":
        parser = argparse.ArgumentParser()
        add_serve_options(parser)
    arguments = parser.parse_args(FLAGS)
    runtime = runtime_here(arguments, arguments.stage_id)
    assert read_stage_options(arguments, 1, arguments.omni_dp_size_local, runtime) == OPTIONS


@pytest.mark.attack("F2")
def test_what_a_host_allows_can_be_said_by_its_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For containers. A flag replaces what its variable says; / is no root by itself, nor is a shared folder."""
    monkeypatch.setenv("OMNI_ALLOW", "target=my_models, pickled-weights")
    monkeypatch.setenv("OMNI_MODEL_ROOT", "/srv/a:/srv/b")
    bounds = read_bounds(build_parser().parse_args(["--stage-id", "0"]))
    assert bounds.allow == ("target=my_models", "pickled-weights")
    assert bounds.model_roots[:2] == bounds.named_roots == ("/srv/a", "/srv/b")
    said = read_bounds(build_parser().parse_args(["--stage-id", "0", "--allow", "all", "--model-root", "/srv/c"]))
    assert (said.allow, said.model_roots[0]) == (("all",), "/srv/c")
    for name in ("OMNI_ALLOW", "OMNI_MODEL_ROOT"):
        monkeypatch.delenv(name)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    for folder, roots in ((tmp_path, (str(tmp_path), "/models")), (Path("/"), ("/models",)), (shared, ("/models",))):
        monkeypatch.chdir(folder)
        bounds = read_bounds(build_parser().parse_args(["--stage-id", "0"]))
        assert (bounds.allow, bounds.model_roots[: len(roots)]) == ((), roots)
        assert not {"/", str(shared)} & set(bounds.model_roots)
        assert bounds.named_roots == ()


def test_a_model_that_the_command_line_names_may_come_from_etcd() -> None:
    """`omni serve MODEL --omni --headless --stage-id 1`: that folder and no other, and nobody vouches for it."""
    parser = argparse.ArgumentParser()
    add_serve_options(parser)
    bounds = read_bounds(parser.parse_args(["/srv/qwen", "--headless", "--stage-id", "1", "--model-root", "/srv/a"]))
    assert bounds.allow == ("model=/srv/qwen",)
    assert "/srv/qwen" not in (*bounds.model_roots, *bounds.named_roots)
    assert read_bounds(parser.parse_args(["--headless", "--stage-id", "1"])).allow == ()


def test_ray_is_part_of_them() -> None:
    arguments = build_parser().parse_args(["--stage-id", "0", "--worker-backend", "ray", "--ray-address", "h:6379"])
    options = read_stage_options(arguments, 0, 1, {})
    assert (options.worker_backend, options.ray_address) == ("ray", "h:6379")


def test_the_document_is_read_as_it_was_written_however_long_it_is() -> None:
    """A deploy document in it can be longer than what a pipe holds."""
    config = msgspec.structs.replace(
        replica_config(OPTIONS, "0.0.0.0", "10.0.0.9", 1),
        known_pipeline="x" * 500_000,
    )
    config_fd = open_config(config)
    assert not os.get_inheritable(config_fd)
    assert read_config(config_fd, ReplicaConfig) == config
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(config_fd)


def test_every_setting_of_the_stage_reaches_its_replicas() -> None:
    replica = replica_config(OPTIONS, "0.0.0.0", "10.0.0.9", 1)
    for name in set(StageOptions.__struct_fields__) & set(ReplicaConfig.__struct_fields__):
        assert getattr(replica, name) == getattr(OPTIONS, name), name
    assert replica.drain_timeout_s == 7.125


def test_a_child_shows_its_stage_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arguments and environment are those that every process of this user can read."""
    monkeypatch.setenv("OMNI_ETCD_PASSWORD", SECRET)
    config_fd = open_config(OPTIONS)
    try:
        command = stage_command(config_fd, 1, "--replica")
        shown = [sys.executable, "-c", "import time; time.sleep(600)", *command[1:]]
        child = subprocess.Popen(shown, pass_fds=(config_fd,), env=child_environment())
    finally:
        os.close(config_fd)
    try:
        # Empty for a moment while the program is being replaced.
        line = wait_for("its arguments", Path(f"/proc/{child.pid}/cmdline").read_bytes, 10.0)
        words = line.split(b"\0")
        assert words[words.index(b"--stage-id") + 1] == b"1"
        environment = Path(f"/proc/{child.pid}/environ").read_bytes()
        assert b"PATH=" in environment
        assert SECRET.encode() not in b"".join(words) + environment
    finally:
        child.kill()
        child.wait()


@pytest.mark.attack("D1")
@pytest.mark.parametrize("kind", ["--replica", "--check", "supervisor"])
def test_a_child_imports_nothing_from_the_folder_it_is_started_in(tmp_path: Path, kind: str) -> None:
    """Somebody else put a module there, under a name that every process imports early."""
    for name in ("msgspec", "stage_runtime", "logging"):
        (tmp_path / f"{name}.py").write_text("open('planted', 'w').close()\n")
    config_fd = open_config(OPTIONS)
    try:
        command = stage_command(config_fd, 1, *(() if kind == "supervisor" else (kind,)))
        # It has no order to follow: it says what is wrong with its settings, and ends.
        os.ftruncate(config_fd, 0)
        done = subprocess.run(
            command, cwd=tmp_path, pass_fds=(config_fd,), capture_output=True, text=True, timeout=60, check=False
        )
    finally:
        os.close(config_fd)
    assert not (tmp_path / "planted").exists()
    assert done.stderr.startswith("omni: ")


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (b"", "truncated"),
        (b"{]", "malformed"),
        (b'{"stage_id": "one", "security": {"user": "u", "password": "hush-hush"}}', r"Expected `int`.*stage_id"),
        (b'{"stage_id": 0, "endpoints": "a:1", "drain_timeout_s": -1}', "--drain-timeout must be"),
    ],
)
@pytest.mark.parametrize("kind", ["--replica", "--check", "supervisor"])
def test_a_bad_document_ends_the_child_with_one_clear_line(document: bytes, reason: str, kind: str) -> None:
    config_fd = os.memfd_create("bad")
    os.write(config_fd, document)
    os.lseek(config_fd, 0, os.SEEK_SET)
    flags = () if kind == "supervisor" else (kind,)
    try:
        command = stage_command(config_fd, 0, *flags)
        ended = subprocess.run(command, pass_fds=(config_fd,), capture_output=True, text=True, timeout=60, check=False)
    finally:
        os.close(config_fd)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("omni: ")
    assert SECRET not in line
    if kind == "--replica":
        assert re.search(reason, line), line


def test_a_descriptor_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match="--config-fd 9999 holds no settings"):
        read_config(9999, StageOptions)


def test_a_child_reads_a_password_that_was_changed_since_its_parent_started(tmp_path: Path) -> None:
    """1. the parent read the file at its start; 2. the password is changed; 3. a child that starts then has the new one
    4. without the file, the child ends with the reason
    """
    file = tmp_path / "password"
    file.write_text("new\n")
    security = RegistrySecurity(user="u", password="old", password_file=str(file))
    options = msgspec.structs.replace(OPTIONS, security=security)
    assert read_config(open_config(options), StageOptions).security.password == "new"
    file.unlink()
    with pytest.raises(ConfigError, match="can't be read"):
        read_config(open_config(options), StageOptions)
