"""Strangers hold connections to a supervisor's and a replica's ports, which have no descriptors to spare."""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from omni_discovery import wire
from tests.support.attackers import descriptors
from tests.support.replica_hub import eventually
from tests.support.replica_stage import Deployment, echo_stages

#: As many strangers at once as a test has, and how long a slow machine may take to let in what is needed of them.
MOST = 1000
LIMIT_S = 120.0


@contextmanager
def strangers(*ports: int, until: Callable[[], bool]) -> Iterator[None]:
    """Connections that say nothing, to all ports in turn, and others for those that were closed, until it holds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    opened: deque[socket.socket] = deque()
    ends_s = time.monotonic() + LIMIT_S
    try:
        while not until():
            assert time.monotonic() < ends_s
            for port in ports:
                opened.append(socket.socket())
                opened[-1].setblocking(False)
                opened[-1].connect_ex(("127.0.0.1", port))
            while len(opened) > MOST:
                opened.popleft().close()
            # What the backlog has no room for is tried again after a second, when the first may be gone.
            time.sleep(0.002)
        yield
    finally:
        for each in opened:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def limit_files(pid: int, spare: int) -> None:
    """Let a process open only so many files more."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (descriptors(pid) + spare, hard))


@pytest.mark.attack("D2")
def test_hand_offs_reach_a_replica_whose_descriptors_strangers_take(
    endpoint: str, namespace: str, tmp_path: Path
) -> None:
    """1. a replica has 300 descriptors to spare, and strangers connect to its two ports, until it pauses
    2. hand-offs are drawn meanwhile, each from a segment that it has to open; 3. a new hub is welcomed
    """
    with Deployment(
        endpoint, namespace, echo_stages({"payload_bytes": 100_000}, {"modality": "image"}), tmp_path
    ) as running:
        running.start(0)
        running.start(1)
        (thinking,), (painting,) = running.wait_up(0), running.wait_up(1)
        thinker, painter = running.session(thinking), running.session(painting)
        limit_files(painting.pid, 300)
        ports = [int(addr.rpartition(":")[2]) for addr in (painting.input_addr, painting.output_addr)]
        with strangers(*ports, until=lambda: "server.connections_paused" in running.log(1).read_text()):
            for name in "abcdef":
                thinker.submit(name, "seven", next_stages=(1,))
                thinker.acknowledged(LIMIT_S)
                _, done, _ = thinker.collect(name, LIMIT_S)
                assert isinstance(done, wire.StageDone)
                painter.submit(name, payloads=done.payloads)
                painter.acknowledged(LIMIT_S)
                _, drawn, pictures = painter.collect(name, LIMIT_S)
                assert isinstance(drawn, wire.StageDone), drawn
                assert pictures[0].startswith(b"\x89PNG")
            late = running.hub(painting)
            late.hello(LIMIT_S)
        assert [each.pid for each in running.replicas(1)] == [painting.pid]


@pytest.mark.attack("D2")
def test_a_supervisor_lives_and_starts_its_replica_again_among_idle_connections(
    endpoint: str, namespace: str, tmp_path: Path
) -> None:
    """1. strangers hold connections to the metrics port; the supervisor has no descriptor left, and its replica is
    killed: it says so and goes on; 2. it may open files again: the replica is started
    """
    with Deployment(endpoint, namespace, echo_stages({}), tmp_path) as running:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        supervisor = running.start(0, 1, "--metrics-port", str(port))
        (info,) = running.wait_up()
        before = descriptors(supervisor.pid)
        with strangers(port, until=lambda: descriptors(supervisor.pid) >= before + 20):
            assert descriptors(supervisor.pid) < before + 80
            _, hard = resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE, (4, hard))
            os.kill(info.pid, signal.SIGKILL)
            assert eventually(lambda: running.log().read_text().count("supervisor.not_started") > 1, LIMIT_S)
            assert supervisor.poll() is None
            resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE, (hard, hard))
            assert eventually(lambda: any(each.pid != info.pid for each in running.replicas()), LIMIT_S)
        assert "Traceback" not in running.log().read_text()
