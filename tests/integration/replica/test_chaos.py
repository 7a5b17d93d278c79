"""``omni chaos`` on real replicas: each is killed, stopped or cordoned, and all come back."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.registry import etcdctl
from tests.support.replica_hub import eventually
from tests.support.replica_stage import Deployment, echo_stages

#: As ``omni chaos``, without the entry point of an installed package.
_COMMAND = "import sys; from omni_discovery.commands.main import OmniParser; \
from omni_discovery.commands.chaos.command import ChaosCommand; \
parser = OmniParser(); ChaosCommand().add_arguments(parser); sys.exit(ChaosCommand().run(parser.parse_args()))"


@pytest.fixture
def deployment(endpoint: str, namespace: str, tmp_path: Path) -> Iterator[Deployment]:
    with Deployment(endpoint, namespace, echo_stages({}), tmp_path) as running:
        running.start(count=2)
        running.wait_up(count=2)
        yield running


def chaos(deployment: Deployment, *words: str) -> tuple[int, str]:
    """Its exit code, and what it said on both outputs."""
    where = ["--etcd-endpoints", deployment.endpoint, "--namespace", deployment.namespace]
    ran = subprocess.run(
        [sys.executable, "-c", _COMMAND, *where, "--seed", "1", *words],
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=180,
    )
    return ran.returncode, ran.stdout


def once(act: str, *words: str) -> tuple[str, ...]:
    return "--yes", "--for", "0", "--hold", "1", "--action", act, *words


def test_a_killed_replica_comes_back_as_another_life(deployment: Deployment) -> None:
    before = {info.epoch for info in deployment.replicas()}
    code, said = chaos(deployment, *once("kill"))
    assert code == 0, said
    killed = re.search(r"killed replica=0/\d+ epoch=(\d+)", said)
    assert killed, said
    assert "as many serve as before" in said
    assert "1 done, all came back" in said
    # The record of the dead stays until its lease ends.
    assert eventually(lambda: int(killed[1]) not in {info.epoch for info in deployment.replicas()})
    now = {info.epoch for info in deployment.replicas()}
    assert len(now) == 2
    assert len(now - before) == 1


@pytest.mark.parametrize(("act", "done", "undone"), [("stop", "stopped", "let go on"), ("cordon", "cordoned", "again")])
def test_what_is_taken_is_given_back(deployment: Deployment, act: str, done: str, undone: str) -> None:
    before = {info.epoch for info in deployment.replicas()}
    code, said = chaos(deployment, *once(act))
    assert code == 0, said
    assert f"{done} replica=0/" in said
    assert undone in said
    found = deployment.wait_up(count=2)
    assert {info.epoch for info in found} == before, "the same lives"
    assert all(info.takes_new_work for info in found)
    assert etcdctl(deployment.endpoint, "get", "--prefix", f"/omni/v1/{deployment.namespace}/control/") == ""


def test_a_replica_that_does_not_come_back_is_told_by_the_exit_code(deployment: Deployment) -> None:
    """Its supervisor stands still, and starts nothing."""
    deployment.supervisors[0].send_signal(signal.SIGSTOP)
    try:
        code, said = chaos(deployment, *once("kill", "--recovery", "3"))
    finally:
        deployment.supervisors[0].send_signal(signal.SIGCONT)
    assert code == 1, said
    assert "stage 0 lacks 1" in said
    assert "not all came back" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_and_what_is_stopped_goes_on(deployment: Deployment, number: signal.Signals) -> None:
    where = ["--etcd-endpoints", deployment.endpoint, "--namespace", deployment.namespace]
    words = ["--yes", "--action", "stop", "--hold", "600", *where]
    with subprocess.Popen([sys.executable, "-c", _COMMAND, *words], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        stopped = next(line for line in running.stdout if "stopped replica=" in line)
        pid = int(stopped.split("process ")[1].split()[0])
        is_stopped = eventually(lambda: state_of(pid) == "T")
        running.send_signal(number)
        said = running.stdout.read()
        assert running.wait(60) == 0, said
    assert is_stopped
    assert "1 done, all came back" in said
    assert eventually(lambda: state_of(pid) in "SR")


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_without_yes_nothing_is_done(deployment: Deployment) -> None:
    code, said = chaos(deployment)
    assert code == 2
    assert said.count("could ") >= 6, said
    assert "no signal to" not in said
    assert "add --yes" in said
