"""The demo kills what its hub asks for, if that is one of the hub's own processes, and nothing else."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from stage_runtime.demo.killing import ReplicaKiller


@contextmanager
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def asked(end: socket.socket, line: bytes) -> str:
    end.settimeout(30)
    end.sendall(line + b"\n")
    answer = b""
    while not answer.endswith(b"\n"):
        answer += end.recv(4096)
    return str(msgspec.json.decode(answer)["error"])


def line_for(pid: int) -> bytes:
    return msgspec.json.encode({"stage_id": 0, "replica_id": 1, "pid": pid})


def test_a_process_of_the_hub_is_killed_and_a_stranger_is_not() -> None:
    killed: list[int] = []
    with sleeper() as mine, sleeper() as strange:
        killer = ReplicaKiller(lambda: [mine.pid], killed.append)
        try:
            assert "none of this demo" in asked(killer.hub_end, line_for(strange.pid))
            assert "does not understand" in asked(killer.hub_end, b'{"pid": "all"}')
            assert (strange.poll(), mine.poll(), killed) == (None, None, [])
            assert asked(killer.hub_end, line_for(mine.pid)) == ""
            assert mine.wait(30) == -9
            assert "has ended already" in asked(killer.hub_end, line_for(mine.pid))
            assert killed == [mine.pid]
        finally:
            killer.close()


def test_nobody_is_killed_once_it_is_closed() -> None:
    killer = ReplicaKiller(lambda: [1], lambda _pid: pytest.fail("it was killed"))
    killer.close()
    killer.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        killer.hub_end.sendall(line_for(1))
