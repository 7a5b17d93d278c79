"""A process that imports an engine's heavy modules once, alone, and then forks a replica whenever it is asked.

It has one thread and touches no device, no socket library and no etcd, so a fork of it is as good as a fresh start,
only ready sooner, and what was imported is shared memory. Orders and answers are JSON messages on one socket.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Final

import msgspec

from omni_discovery.processes import end_group, has_ended
from stage_runtime.config import ReplicaConfig

#: Longest message; the deploy document travels in an order.
MAX_MESSAGE_BYTES: Final = 1 << 20
_TICK_S: Final = 0.1

Token = Annotated[int, msgspec.Meta(ge=0)]


class Start(msgspec.Struct, frozen=True, tag_field="t", tag="start"):
    """Fork a replica; the descriptor that comes along is where it prints."""

    token: Token
    config: ReplicaConfig
    environment: dict[str, str]


class Signal(msgspec.Struct, frozen=True, tag_field="t", tag="signal"):
    """Send a signal to a replica; nothing happens if it has ended."""

    token: Token
    number: int


class Started(msgspec.Struct, frozen=True, tag_field="t", tag="started"):
    """The replica runs."""

    token: Token
    pid: int


class Ended(msgspec.Struct, frozen=True, tag_field="t", tag="ended"):
    """The replica's exit code, negative for a signal."""

    token: Token
    code: int


Order = Start | Signal
Notice = Started | Ended

#: What a forked replica runs: its settings and environment in, its exit code out.
RunReplica = Callable[[ReplicaConfig, dict[str, str]], int]


class Zygote:
    """Serves orders until the socket closes; then kills what it started."""

    def __init__(self, orders: socket.socket, run_replica: RunReplica) -> None:
        self._orders = orders
        self._run_replica = run_replica
        self._tokens: dict[int, int] = {}

    def serve(self, modules: Sequence[str]) -> None:
        """Import, then fork on demand."""
        for module in modules:
            importlib.import_module(module)
        # What is there by now stays for good: the collector must not write to its pages in every child.
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
        content, descriptors, _, _ = socket.recv_fds(self._orders, MAX_MESSAGE_BYTES, 1)
        if not content:
            return False
        order: Order = msgspec.json.decode(content, type=Order)
        match order:
            case Start():
                self._fork(order, descriptors[0])
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
        self._say(Started(order.token, pid))

    def _become_replica(self, order: Start, output_fd: int) -> None:
        code = 1
        try:
            self._orders.close()
            os.setsid()
            for standard in (1, 2):
                os.dup2(output_fd, standard)
            os.close(output_fd)
            code = self._run_replica(order.config, order.environment)
        except BaseException:  # noqa: BLE001 - nobody above us would print it
            traceback.print_exc()
        finally:
            # A child must never return into the zygote's loop.
            os._exit(code)

    def _reap(self) -> None:
        for pid in list(self._tokens):
            if has_ended(pid):
                end_group(pid)
                _, status = os.waitpid(pid, 0)
                self._say(Ended(self._tokens.pop(pid), os.waitstatus_to_exitcode(status)))

    def _say(self, notice: Notice) -> None:
        # Who asked may be gone; then the next read says so.
        with contextlib.suppress(OSError):
            self._orders.send(msgspec.json.encode(notice))
