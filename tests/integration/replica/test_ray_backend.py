"""Replicas as actors of a Ray cluster of two machines, each a network namespace: Ray listens on all interfaces."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.host_etcd import REGISTRY_PORT, etcd_on, etcdctl_on
from tests.support.netns import Host, Network, require_netns
from tests.support.processes import alive, descendants, wait_for

pytest.importorskip("ray", reason="Ray is not installed")

HEAD_PORT = 6379
PIPELINE = {
    "stages": [{"stage_id": 0, "engine": "echo", "final_output": "text", "runtime": {"ray": {"strategy": "SPREAD"}}}]
}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Host]]:
    """A cluster of two machines with room for one replica each, and an etcd on the first."""
    require_netns()
    folder = tmp_path_factory.mktemp("ray")
    with Network("one", "two") as network, ExitStack() as stack:
        one, two = network.hosts["one"], network.hosts["two"]
        stack.enter_context(etcd_on(one, folder))
        etcdctl_on(one, "put", "/omni/v1/default/pipeline", json.dumps(PIPELINE))
        # Ray makes sockets in it, whose paths must be short.
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True))
        head = ["--head", f"--port={HEAD_PORT}", "--include-dashboard=false", f"--temp-dir={scratch}"]
        stack.enter_context(ray_on(one, folder / "one.log", *head))
        wait_for("the head", lambda: is_open(one, HEAD_PORT))
        stack.enter_context(ray_on(two, folder / "two.log", f"--address={one.address}:{HEAD_PORT}"))
        yield network.hosts


def test_replicas_are_spread_over_the_cluster_and_come_back_where_it_has_room(
    hosts: Mapping[str, Host], tmp_path: Path
) -> None:
    """1. two replicas of stage 0, one on each machine, each reached by its own machine's address
    2. the second machine's is killed: it runs there again, another life
    3. SIGTERM: both drain, the supervisor ends with 0, nothing is left on any machine
    """
    one, two = hosts["one"], hosts["two"]
    with supervisor(one, tmp_path / "log") as process:
        first = wait_up(one, 2)
        assert {address_of(record) for record in first} == {one.address, two.address}
        victim = next(record["pid"] for record in first if address_of(record) == two.address)
        os.kill(victim, signal.SIGKILL)
        again = wait_up(one, 2, without=victim)
        assert {address_of(record) for record in again} == {one.address, two.address}
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, (tmp_path / "log").read_text()
    # The one that was killed could not withdraw; its lease ends by itself.
    assert {record["pid"] for record in records(one)} <= {victim}
    wait_gone(record["pid"] for record in [*first, *again])


def test_replicas_end_with_their_supervisor_however_that_ends(hosts: Mapping[str, Host], tmp_path: Path) -> None:
    with supervisor(hosts["one"], tmp_path / "log") as process:
        pids = [record["pid"] for record in wait_up(hosts["one"], 2)]
        process.kill()
        wait_gone(pids)


def test_a_cluster_without_room_is_told_with_what_it_has(hosts: Mapping[str, Host], tmp_path: Path) -> None:
    log = tmp_path / "log"
    with supervisor(hosts["one"], log, count=3) as process:
        wait_for(
            "the warning", lambda: "ray.waiting stage=0 wants=3 x CPU=1 (SPREAD) cluster_has=CPU=2" in log.read_text()
        )
        process.terminate()
        process.wait(30)
    assert not [record for record in records(hosts["one"]) if record["status"] == "starting"]


@contextmanager
def ray_on(host: Host, log: Path, *flags: str) -> Iterator[None]:
    command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus=1", "--disable-usage-stats"]
    command += [f"--node-ip-address={host.address}", "--object-store-memory=100000000", *flags]
    with log.open("wb") as said:
        process = subprocess.Popen(host.command(*command), stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    tree = [process.pid]
    try:
        yield
        tree = descendants(process.pid)
    finally:
        process.terminate()
        process.wait(60)
        for pid in alive(tree):
            os.kill(pid, signal.SIGKILL)


def is_open(host: Host, port: int) -> bool:
    with host.inside(), socket.socket() as probe:
        return probe.connect_ex((host.address, port)) == 0


@contextmanager
def supervisor(host: Host, log: Path, count: int = 2) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        *(sys.executable, "-m", "stage_runtime", "--stage-id", "0", "--omni-dp-size-local", str(count)),
        *("--etcd-endpoints", f"{host.address}:{REGISTRY_PORT}", "--omni-heartbeat-timeout", "5"),
        *("--worker-backend", "ray", "--ray-address", f"{host.address}:{HEAD_PORT}"),
    ]
    with log.open("wb") as said:
        process = subprocess.Popen(host.command(*command), stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def records(host: Host) -> list[dict[str, Any]]:
    printed = etcdctl_on(host, "get", "--prefix", "--print-value-only", "/omni/v1/default/replicas/") or ""
    return [json.loads(line) for line in printed.splitlines()]


def wait_up(host: Host, count: int, without: int = 0) -> list[dict[str, Any]]:
    """The records once there are so many, all up, not counting one process's."""

    def probe() -> list[dict[str, Any]] | None:
        found = [record for record in records(host) if record["pid"] != without]
        return found if [record["status"] for record in found] == ["up"] * count else None

    return wait_for(f"{count} replicas that are up", probe, 120)


def wait_gone(pids: Iterable[int]) -> None:
    left = list(pids)
    wait_for("the replicas to be gone", lambda: not any(Path(f"/proc/{pid}").exists() for pid in left))


def address_of(record: Mapping[str, Any]) -> str:
    (address,) = {record[field].removeprefix("tcp://").split(":")[0] for field in ("input_addr", "output_addr")}
    return address
