"""A hub whose receive queue is full when the connection breaks, and which does not read for some heartbeats.

``python -m tests.support.full_queue`` prints "alive" if it outlives that. libzmq ends a process by a signal here.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import zmq

from hub.replicas.long_turns import LongTurns
from hub.replicas.resolver import Resolver
from hub.replicas.sockets import DealerConnection, make_context, open_connections
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from omni_discovery.wire.session import SocketName
from tests.support.hub_fakes import QUICK

_MESSAGES = 50_000


def _flood(ports: tuple[str, str]) -> None:
    """Send each hub that says something far more than its queue takes, then end without a word."""
    context = zmq.Context()
    for port in ports:
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.bind(f"tcp://127.0.0.1:{port}")
        hub, _ = socket.recv_multipart()
        for _ in range(_MESSAGES):
            socket.send_multipart([hub, b"x" * 200])
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


class _Deaf:
    """Greets, and reads nothing while it counts."""

    def __init__(self) -> None:
        self.connections: dict[SocketName, DealerConnection] = {}
        self.made: list[SocketName] = []

    def frames_received(self, name: SocketName, frames: list[bytes]) -> None:
        """Too much of it."""

    def connection_made(self, name: SocketName) -> None:
        self.made.append(name)
        self.connections[name].send([b"hello"])

    def connection_lost(self, name: SocketName) -> None:
        """Of no interest."""

    def connection_missed(self) -> None:
        """Of no interest."""

    def fell_silent(self) -> None:
        """Of no interest."""


async def _listen(ports: tuple[str, str], flood: subprocess.Popen[bytes]) -> None:
    addrs = [f"tcp://127.0.0.1:{port}" for port in ports]
    info = ReplicaInfo(
        input_addr=addrs[0],
        output_addr=addrs[1],
        stage_id=0,
        status=ReplicaStatus.UP,
        queue_length=0,
        last_heartbeat=0.0,
        registered_at=0.0,
        replica_id=0,
        epoch=1,
    )
    config = replace(QUICK, zmq_heartbeat_interval_s=0.3, zmq_heartbeat_timeout_s=60.0)
    deaf = _Deaf()
    context = make_context()
    deaf.connections = open_connections(context, info, "hub", None, config, deaf, Resolver(), LongTurns())
    async with asyncio.timeout(30.0):
        while len(deaf.made) < len(ports):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    # Nothing is read meanwhile, as by a hub that is far behind.
    flood.wait(60.0)
    time.sleep(2.0)  # noqa: ASYNC251
    await asyncio.sleep(0.1)
    for connection in deaf.connections.values():
        connection.close()


def main() -> None:
    """Be the hub, or with two ports as arguments the replica."""
    if len(sys.argv) > 1:
        _flood((sys.argv[1], sys.argv[2]))
    with zmq.Context() as context:
        sockets = [context.socket(zmq.ROUTER) for _ in range(2)]
        ports = tuple(str(socket.bind_to_random_port("tcp://127.0.0.1")) for socket in sockets)
        for socket in sockets:
            socket.close(linger=0)
    flood = subprocess.Popen([sys.executable, "-m", "tests.support.full_queue", *ports])
    asyncio.run(_listen((ports[0], ports[1]), flood))
    sys.stdout.write("alive\n")


if __name__ == "__main__":
    main()
