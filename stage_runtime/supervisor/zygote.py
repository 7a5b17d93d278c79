"""The zygote: a process that imports an engine's heavy modules once and then forks replicas.

It has one thread and opens no device, no ZMQ or etcd connection, so a fork of it behaves like a new process, starts
sooner, and shares the memory of the imported modules. Orders and notices are JSON messages on one socket.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import select
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Annotated, Final

import msgspec

from omni_discovery.processes import end_group, has_ended
from stage_runtime.config import ReplicaConfig

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES: Final = 1 << 20
#: A longer order goes by memory: it holds the deploy document, and sockets of some hosts take 200 KiB at once, or less.
LONG_BYTES: Final = 1 << 14
_TICK_S: Final = 0.1

Token = Annotated[int, msgspec.Meta(ge=0)]


class Start(msgspec.Struct, frozen=True, tag_field="t", tag="start"):
    """Fork a replica. The message carries the descriptor of its standard output and standard error."""

    token: Token
    config: ReplicaConfig
    environment: dict[str, str]


class StartInMemory(msgspec.Struct, frozen=True, tag_field="t", tag="start_in_memory"):
    """The same, where the order itself is what a second descriptor holds."""


class Signal(msgspec.Struct, frozen=True, tag_field="t", tag="signal"):
    """Send a signal to a replica. Does nothing if the replica has ended."""

    token: Token
    number: int


class Started(msgspec.Struct, frozen=True, tag_field="t", tag="started"):
    """The replica was forked; it says so itself, before it prints anything."""

    token: Token
    pid: int


class Ended(msgspec.Struct, frozen=True, tag_field="t", tag="ended"):
    """The replica's exit code, negative for a signal."""

    token: Token
    code: int


Order = Start | StartInMemory | Signal
Notice = Started | Ended

#: Runs a forked replica with its settings and environment; returns its exit code.
RunReplica = Callable[[ReplicaConfig, dict[str, str]], int]


class Zygote:
    """Serves orders until the socket closes; then kills its replicas."""

    def __init__(self, orders: socket.socket, run_replica: RunReplica) -> None:
        self._orders = orders
        self._run_replica = run_replica
        self._tokens: dict[int, int] = {}

    def serve(self, modules: Sequence[str]) -> None:
        """Import the modules, then fork replicas on demand."""
        for module in modules:
            importlib.import_module(module)
        # The imported objects live for ever: the garbage collector must not write to their pages in each child.
        gc.collect()
        gc.freeze()
        while self._turn():
            self._reap()
        for pid in self._tokens:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            end_group(pid)

    def _turn(self) -> bool:
        if not select.select([self._orders], [], [], _TICK_S)[0]:
            return True
        content, descriptors, _, _ = socket.recv_fds(self._orders, MAX_MESSAGE_BYTES, 2)
        if not content:
            return False
        order: Order = msgspec.json.decode(content, type=Order)
        match order:
            case Start():
                self._fork(order, descriptors[0])
            case StartInMemory():
                with os.fdopen(descriptors[1], "rb") as memory:
                    start = msgspec.json.decode(memory.read(), type=Start)
                self._fork(start, descriptors[0])
            case Signal(token, number):
                for pid in [pid for pid, known in self._tokens.items() if known == token]:
                    os.kill(pid, number)
        return True

    def _fork(self, order: Start, output_fd: int) -> None:
        pid = os.fork()
        if pid == 0:
            self._become_replica(order, output_fd)
        os.close(output_fd)
        self._tokens[pid] = order.token

    def _become_replica(self, order: Start, output_fd: int) -> None:
        code = 1
        try:
            self._send(Started(order.token, os.getpid()))
            self._orders.close()
            os.setsid()
            for standard in (1, 2):
                os.dup2(output_fd, standard)
            os.close(output_fd)
            code = self._run_replica(order.config, order.environment)
        except BaseException as error:
            # os._exit below would hide it.
            logger.critical("process.crashed error=%s", type(error).__name__, exc_info=True)
        finally:
            # A child must never return into the zygote's loop.
            os._exit(code)

    def _reap(self) -> None:
        for pid in list(self._tokens):
            if has_ended(pid):
                end_group(pid)
                _, status = os.waitpid(pid, 0)
                self._send(Ended(self._tokens.pop(pid), os.waitstatus_to_exitcode(status)))

    def _send(self, notice: Notice) -> None:
        # The supervisor may be gone; the next read then returns nothing.
        with contextlib.suppress(OSError):
            self._orders.send(msgspec.json.encode(notice))
