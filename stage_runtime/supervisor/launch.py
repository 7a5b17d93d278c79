"""Launchers of replica processes: a new interpreter for each (spawn), or forks of a zygote."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec

from omni_discovery.commands.stage_options import open_config, stage_command
from omni_discovery.processes import end_group, has_ended
from stage_runtime.config import ReplicaConfig
from stage_runtime.supervisor.restarts import EXIT_FAILED
from stage_runtime.supervisor.supervisor import Child
from stage_runtime.supervisor.zygote import (
    LONG_BYTES,
    MAX_MESSAGE_BYTES,
    Ended,
    Notice,
    Order,
    Signal,
    Start,
    Started,
    StartInMemory,
)

logger = logging.getLogger(__name__)


class SpawnedChild:
    """A replica started by SpawnLauncher."""

    def __init__(self, process: subprocess.Popen[bytes], output_fd: int) -> None:
        self._process = process
        self.output_fd = output_fd

    @property
    def pid(self) -> int:
        """See Child."""
        return self._process.pid

    def poll(self) -> int | None:
        """See Child."""
        if self._process.returncode is None and has_ended(self._process.pid):
            # Until it is reaped, its process id can't be reused: processes that its engine left behind are killed here.
            end_group(self._process.pid)
        return self._process.poll()

    def send_signal(self, number: int) -> None:
        """See Child."""
        if number == signal.SIGKILL and self._process.returncode is None:
            end_group(self._process.pid)
        self._process.send_signal(number)


class SpawnLauncher:
    """Starts each replica in an interpreter of its own: ``python``, or this process's."""

    phase = ""

    def __init__(self, python: str = "") -> None:
        self._python = python

    def start(self, config: ReplicaConfig, environment: dict[str, str]) -> Child:
        """See Launcher."""
        config_fd = open_config(config)
        try:
            output_fd, write_fd = os.pipe()
            try:
                process = subprocess.Popen(
                    stage_command(
                        config_fd, config.stage_id, "--replica", python=self._python, namespace=config.namespace
                    ),
                    stdin=subprocess.DEVNULL,
                    stdout=write_fd,
                    stderr=write_fd,
                    pass_fds=(config_fd,),
                    env=environment,
                    # Ctrl-C in a terminal is for the supervisor, which drains.
                    start_new_session=True,
                )
            except OSError:
                os.close(output_fd)
                raise
            finally:
                os.close(write_fd)
        finally:
            os.close(config_fd)
        return SpawnedChild(process, output_fd)

    def close(self) -> None:
        """See Launcher."""


class ForkedChild:
    """A replica started by ZygoteLauncher; ``forked_pid`` is 0 until the zygote has forked it."""

    def __init__(self, launcher: ZygoteLauncher, token: int, output_fd: int) -> None:
        self._launcher = launcher
        self.token = token
        self.forked_pid = 0
        self.output_fd = output_fd
        self.code: int | None = None

    @property
    def pid(self) -> int:
        """See Child. The replica itself says so, before it prints anything."""
        if not self.forked_pid:
            self._launcher.read_notices()
        return self.forked_pid

    def poll(self) -> int | None:
        """See Child."""
        self._launcher.read_notices()
        return self.code

    def send_signal(self, number: int) -> None:
        """See Child."""
        self._launcher.signal_child(self, number)


def _send_start(orders: socket.socket, order: Start, output_fd: int) -> None:
    """Send an order however long it is. Raise OSError."""
    content = msgspec.json.encode(order)
    if len(content) <= LONG_BYTES:
        socket.send_fds(orders, [content], [output_fd])
        return
    memory_fd = open_config(order)
    try:
        socket.send_fds(orders, [msgspec.json.encode(StartInMemory())], [output_fd, memory_fd])
    finally:
        os.close(memory_fd)


class ZygoteLauncher:
    """Starts replicas as forks of a zygote that has imported ``modules``; starts the zygote when needed.

    ``output_fd`` is for what the zygote prints; ``python`` its interpreter, this process's by default.
    """

    def __init__(self, modules: Sequence[str], output_fd: int, python: str = "") -> None:
        self._python = python or sys.executable
        self._modules = modules
        self._output_fd = output_fd
        #: When the zygote was started, monotonic; None once it has imported the modules.
        self._importing_since_s: float | None = None
        self._zygote: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._children: dict[int, ForkedChild] = {}
        self._tokens = 0

    def start(self, config: ReplicaConfig, environment: dict[str, str]) -> Child:
        """See Launcher."""
        self.read_notices()
        zygote_pid, orders = self._ensure_zygote(config, environment)
        output_fd, write_fd = os.pipe()
        self._tokens += 1
        child = ForkedChild(self, self._tokens, output_fd)
        self._children[child.token] = child
        order = Start(child.token, msgspec.structs.replace(config, parent_pid=zygote_pid), environment)
        try:
            _send_start(orders, order, write_fd)
        except OSError:
            child.code = EXIT_FAILED
        finally:
            os.close(write_fd)
        return child

    @property
    def phase(self) -> str:
        """See Launcher."""
        return "" if self._importing_since_s is None else f"importing {self._packages}"

    @property
    def _packages(self) -> str:
        return ",".join(dict.fromkeys(module.partition(".")[0] for module in self._modules))

    def signal_child(self, child: ForkedChild, number: int) -> None:
        """Have the zygote send a signal: it reaps its children, so it can't hit a reused process id."""
        self.read_notices()
        if child.code is not None:
            return
        if self._zygote is not None and not any(other.forked_pid for other in self._children.values()):
            # The zygote is still importing: it would not read the order for a while, and has no children.
            self._zygote.kill()
        self._send(Signal(child.token, number))

    def read_notices(self) -> None:
        """Read what the zygote has sent. If the zygote has ended, its children have, too."""
        while self._orders is not None:
            try:
                content = self._orders.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                content = b""
            if not content:
                self._reap_zygote()
                return
            notice: Notice = msgspec.json.decode(content, type=Notice)
            match notice:
                case Started(token, pid):
                    self._children[token].forked_pid = pid
                    self._note_imported()
                case Ended(token, code):
                    self._children.pop(token).code = code

    def close(self) -> None:
        """See Launcher. The zygote ends with its socket, and its children with it."""
        if self._orders is not None:
            self._reap_zygote()

    def _note_imported(self) -> None:
        if self._importing_since_s is not None:
            took_s, self._importing_since_s = time.monotonic() - self._importing_since_s, None
            logger.info("supervisor.imported packages=%s took_s=%.1f", self._packages, took_s)

    def _ensure_zygote(self, config: ReplicaConfig, environment: dict[str, str]) -> tuple[int, socket.socket]:
        if self._zygote is None or self._orders is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                try:
                    options = msgspec.json.encode(config.log).decode()
                    words = ["-u", "-P", "-m", "stage_runtime", "--zygote", str(os.getpid()), options]
                    # For who reads the process list: its children are called as it is.
                    words += ["--namespace", config.namespace, *self._modules]
                    self._zygote = subprocess.Popen(
                        [self._python, *words],
                        stdin=theirs.fileno(),
                        stdout=self._output_fd,
                        stderr=self._output_fd,
                        env=environment,
                        start_new_session=True,
                    )
                except OSError:
                    ours.close()
                    raise
            self._orders = ours
            self._importing_since_s = time.monotonic()
        return self._zygote.pid, self._orders

    def _send(self, order: Order) -> None:
        with contextlib.suppress(OSError):
            if self._orders is not None:
                self._orders.send(msgspec.json.encode(order))

    def _reap_zygote(self) -> None:
        if self._orders is not None:
            self._orders.close()
            self._orders = None
        self._importing_since_s = None
        if self._zygote is not None:
            try:
                code = self._zygote.wait(timeout=5.0)
            except subprocess.TimeoutExpired:
                self._zygote.kill()
                code = self._zygote.wait()
            self._zygote = None
            for child in self._children.values():
                child.code = code or EXIT_FAILED
        self._children.clear()
