"""A hub that is stopped while a replica talks to it, and goes on when the replica is gone and its queue is full.

``python -m tests.support.stopped_hub`` prints "alive" if it outlives that. libzmq ends its process if a heartbeat lies
behind the messages.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Final

import zmq

from hub.config import HubConfig
from hub.replicas.sockets import _configure
from stage_runtime.config import ServerConfig
from stage_runtime.server.router import Router

#: More than a hub's receive queue takes; with what is between them less than ZMQ reads at one time.
_MESSAGES: Final = 40


def _talk(said: int) -> None:
    """Be the replica: tell the port, stop the hub, talk for longer than heartbeats take, end, and let the hub go on."""
    context = zmq.Context()
    router = Router(context, ServerConfig(), "127.0.0.1", None, lambda _: ())
    os.write(said, str(router.port).encode())
    hub, *_ = router.socket.recv_multipart()
    time.sleep(0.2)
    os.kill(os.getppid(), signal.SIGSTOP)
    for number in range(_MESSAGES):
        router.socket.send_multipart([hub, b"x" * 20])
        # Once behind what fills the queue there is time for a heartbeat.
        time.sleep(1.5 if number == _MESSAGES // 2 else 0.0)
    time.sleep(0.2)
    router.socket.close(linger=1000)
    context.term()
    os.kill(os.getppid(), signal.SIGCONT)
    os._exit(0)


def main() -> None:
    """Be the hub."""
    asked, said = os.pipe()
    # Before there is any thread here.
    replica = os.fork()
    if not replica:
        _talk(said)
    port = int(os.read(asked, 10))
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    _configure(socket, "hub", None, HubConfig())
    socket.connect(f"tcp://127.0.0.1:{port}")
    socket.send(b"hello")
    os.waitpid(replica, 0)
    # Who says something to a connection that is closed is told that it is broken.
    time.sleep(0.2)
    socket.send(b"too late")
    time.sleep(0.5)
    count = 0
    while socket.poll(300):
        socket.recv()
        count += 1
    socket.close()
    context.term()
    sys.stdout.write(f"alive, read {count}\n")


if __name__ == "__main__":
    main()
