"""A real etcd for tests, one that can be killed, stopped and restarted on its data, and its own command line tool."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from omni_discovery.errors import ConfigError
from omni_discovery.etcd import _die_with_parent
from omni_discovery.etcd.embedded import find_binary
from omni_discovery.sockets.listen import bind
from tests.support.quiet import patience_s

_Found = TypeVar("_Found")


async def eventually(what: str, probe: Callable[[], _Found | None], timeout_s: float = 10.0) -> _Found:
    """The first truthy value of the probe; fails with ``what`` when none comes in time."""
    limit_s = patience_s(timeout_s)
    deadline_s = time.monotonic() + limit_s
    while not (found := probe()):
        assert time.monotonic() < deadline_s, f"waited {limit_s:.0f} s for {what}"
        await asyncio.sleep(0.02)
    return found


def etcdctl(endpoint: str, *arguments: str, given: bytes | None = None) -> str:
    """Run etcdctl as an operator would, with ``given`` on its standard input; return what it prints."""
    binary = find_binary(None).with_name("etcdctl")
    # What the shell says of another etcd stands in the way of the flags.
    base = {name: value for name, value in os.environ.items() if not name.startswith("ETCDCTL_")}
    environment = {**base, "ETCDCTL_API": "3"}
    command = [str(binary), f"--endpoints={endpoint}", *arguments]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, timeout=20, input=given)
    return done.stdout.decode()


def revision_of(endpoint: str) -> int:
    """The store's revision now."""
    return int(json.loads(etcdctl(endpoint, "get", "/", "-w", "json"))["header"]["revision"])


def compact(endpoint: str) -> None:
    """Forget all history up to now."""
    etcdctl(endpoint, "compact", str(revision_of(endpoint)))


def quiet_port() -> int:
    """A free port of loopback that stays free: from below those that the kernel gives to outgoing connections."""
    while True:
        port = random.randrange(16_000, 32_000)
        with suppress(ConfigError):
            for listener in bind("127.0.0.1", port):
                listener.close()
            return port


class EtcdServer:
    """One etcd with a data directory and a port that stay the same over restarts.

    ``flags`` are further ones of etcd's; with ``tls_flags`` for etcdctl it is one that speaks TLS.
    """

    def __init__(
        self, folder: Path, *, binary: Path | None = None, flags: Sequence[str] = (), tls_flags: Sequence[str] = ()
    ) -> None:
        self._binary = find_binary(binary)
        self._flags = flags
        self._tls_flags = tls_flags
        self._data = folder / "data"
        self._log = folder / "etcd.log"
        self._token = uuid.uuid4().hex
        # Drawn at random, two may be the same.
        first, second = quiet_port(), quiet_port()
        while second == first:
            second = quiet_port()
        self._ports = first, second
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def started_cluster(cls, folder: Path, count: int) -> list[EtcdServer]:
        """So many members of one cluster."""
        servers = []
        for number in range(count):
            (folder / f"member{number}").mkdir()
            servers.append(cls(folder / f"member{number}"))
        peers = ",".join(f"m{number}=http://127.0.0.1:{each._ports[1]}" for number, each in enumerate(servers))
        for number, server in enumerate(servers):
            token = f"--initial-cluster-token={servers[0]._token}"
            server._flags = (f"--name=m{number}", f"--initial-cluster={peers}", token)
        cls.start_all(servers)
        return servers

    @staticmethod
    def start_all(members: Sequence[EtcdServer]) -> None:
        """Start members of one cluster that need each other for a quorum."""
        # By this thread: an etcd ends with the one that has started it.
        for each in members:
            each._launch()
        for each in members:
            each._wait()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self._ports[0]}"

    def start(self) -> None:
        self._launch()
        self._wait()

    def _launch(self) -> None:
        client = f"{'https' if self._tls_flags else 'http'}://127.0.0.1:{self._ports[0]}"
        peer = f"http://127.0.0.1:{self._ports[1]}"
        command = [
            str(self._binary),
            "--unsafe-no-fsync",
            f"--data-dir={self._data}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            f"--initial-cluster-token={self._token}",
            "--heartbeat-interval=50",
            "--election-timeout=250",
            "--log-level=warn",
            *self._flags,
        ]
        with self._log.open("ab") as log:
            launcher = [sys.executable, "-I", "-S", _die_with_parent.__file__]
            self._process = subprocess.Popen(launcher, stdin=subprocess.PIPE, stdout=log, stderr=log)
        assert self._process.stdin is not None
        with self._process.stdin as orders:
            orders.write(json.dumps({"parent_pid": os.getpid(), "command": command}).encode())

    def _wait(self) -> None:
        deadline_s = time.monotonic() + 15
        while True:
            try:
                self.etcdctl("--dial-timeout=1s", "--command-timeout=1s", "get", "/")
                return
            except subprocess.CalledProcessError as error:
                # Once it has users, it serves if it asks who we are.
                if b"user name is empty" in error.stderr:
                    return
                assert time.monotonic() < deadline_s, self._log.read_text()
                time.sleep(0.05)

    def etcdctl(self, *arguments: str) -> str:
        """Run etcdctl on it, with the TLS flags that it needs."""
        return etcdctl(self.endpoint, *self._tls_flags, *arguments)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """As if its machine lost power."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
