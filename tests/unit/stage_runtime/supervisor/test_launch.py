"""What replicas leave behind when they end: nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest

from omni_discovery.commands.registry import child_environment
from stage_runtime.config import ReplicaConfig
from stage_runtime.supervisor.launch import SpawnedChild, SpawnLauncher, ZygoteLauncher
from stage_runtime.supervisor.zygote import Ended, Notice, Started
from tests.support.processes import wait_for
from tests.support.replica_stage import is_running

#: Starts a process of its own, says which, and ends in a way of its own.
LEAVES_ONE = "sleep 600 & echo $!; exec sleep 600"


def test_what_a_killed_replica_had_started_goes_with_it() -> None:
    """An engine's own processes: they are in the replica's group, and nobody else would end them."""
    reading, writing = os.pipe()
    process = subprocess.Popen(["sh", "-c", LEAVES_ONE], stdout=writing, start_new_session=True)
    os.close(writing)
    with os.fdopen(reading) as printed:
        left_behind = int(printed.readline())
        child = SpawnedChild(process, printed.fileno())
        assert child.poll() is None
        os.kill(process.pid, signal.SIGKILL)
        assert wait_for("the end", lambda: child.poll() == -signal.SIGKILL)
        wait_for("what it had started", lambda: not is_running(left_behind))
        child.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("by_zygote", [False, True], ids=["itself", "with its zygote"])
def test_what_a_forked_replica_had_started_goes_with_it(by_zygote: bool) -> None:
    """1. a zygote's replica has started a process; 2. it ends by itself, or its zygote is told to end: both are gone"""
    program = """
        import socket, subprocess, sys, time
        from stage_runtime.supervisor.zygote import Zygote

        def run_replica(config, environment):
            print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
            if config.ordinal == 0:
                return 7
            time.sleep(600)

        with socket.socket(fileno=0) as orders:
            Zygote(orders, run_replica).serve(())
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reading, writing = os.pipe()
    with ours, theirs, os.fdopen(reading) as printed:
        zygote = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdin=theirs.fileno())
        theirs.close()
        settings = {"stage_id": 0, "endpoints": "127.0.0.1:1", "namespace": "n", "ordinal": int(by_zygote)}
        order = {"t": "start", "token": 1, "config": settings, "environment": {}}
        socket.send_fds(ours, [msgspec.json.encode(order)], [writing])
        os.close(writing)
        ours.settimeout(30)
        started = msgspec.json.decode(ours.recv(65536), type=Notice)
        assert isinstance(started, Started)
        left_behind = int(printed.readline())
        if by_zygote:
            ours.close()
        else:
            assert msgspec.json.decode(ours.recv(65536), type=Notice) == Ended(1, 7)
            ours.close()
        assert zygote.wait(30) == 0
        for pid in (started.pid, left_behind):
            wait_for("its end", lambda pid=pid: not is_running(pid))


@pytest.mark.attack("D1")
@pytest.mark.parametrize("forked", [False, True])
def test_a_replica_imports_nothing_from_the_folder_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: bool
) -> None:
    """Nor do programs that it starts: its environment says so too."""
    for name in ("msgspec", "logging", "stage_runtime"):
        (tmp_path / f"{name}.py").write_text("open('planted', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    environment = child_environment()
    assert environment.pop("PYTHONSAFEPATH") == "1"
    reading, writing = os.pipe()
    launcher = ZygoteLauncher(("json",), writing) if forked else SpawnLauncher()
    # Nobody answers there: it says so, and ends.
    config = ReplicaConfig(stage_id=0, endpoints="127.0.0.1:9", namespace="n", pipeline_wait_s=0.1)
    try:
        child = launcher.start(config, environment)
        assert wait_for("the replica's end", child.poll, 60.0) == 1
        assert "no etcd answered" in os.read(child.output_fd, 65536).decode()
    finally:
        launcher.close()
        os.close(reading)
        os.close(writing)
    os.close(child.output_fd)
    assert not (tmp_path / "planted").exists()


@pytest.mark.attack("R5")
@pytest.mark.parametrize("long_bytes", [1 << 10, 1 << 21])
def test_a_replica_starts_however_long_its_document_is(long_bytes: int) -> None:
    """A socket takes some 200 KiB in one message."""
    reading, writing = os.pipe()
    launcher = ZygoteLauncher(("json",), writing)
    named = {"stage_id": 0, "endpoints": "127.0.0.1:9", "namespace": "n", "pipeline_wait_s": 0.1}
    config = ReplicaConfig(**named, known_pipeline="x" * long_bytes)  # type: ignore[arg-type]
    try:
        child = launcher.start(config, child_environment())
        wait_for("the replica", lambda: child.pid or child.poll() is not None, 60.0)
        assert child.pid
        wait_for("the replica's end", lambda: child.poll() is not None, 60.0)
    finally:
        launcher.close()
        for each in (reading, writing):
            os.close(each)
    os.close(child.output_fd)
