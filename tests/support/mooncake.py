"""Mooncake's real package, on a host of the tests' own: its engines and its master listen on every address there is."""

from __future__ import annotations

import atexit
import functools
import importlib
import itertools
import os
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Self

from tests.support.binaries import absent
from tests.support.netns import Host, Network, require_netns
from tests.support.processes import wait_for

#: It tells much otherwise.
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")


#: Where the master listens on that host: where connectors look for it unless they are told.
MASTER_PORT = 50051


def require_mooncake() -> None:
    """The package is there, or the test is not run."""
    try:
        importlib.import_module("mooncake.engine")
    except ImportError as error:
        absent(f"Mooncake can't be imported ({error}): .[mooncake] and libibverbs1 are wanted")


@functools.cache
def mooncake_host() -> Host:
    """The host on which Mooncake may run: one for the whole test run, as an engine stays in its process to the end."""
    require_mooncake()
    require_netns()
    network = Network("mooncake")
    network.__enter__()
    atexit.register(network.__exit__, None, None, None)
    return network.hosts["mooncake"]


@functools.cache
def mooncake_master() -> None:
    """Have a master on that host, to the end of the run."""
    atexit.register(_stop, start_master(mooncake_host(), "127.0.0.1"))


@contextmanager
def master_on(host: Host) -> Iterator[None]:
    """A master that all hosts reach."""
    master = start_master(host, host.address)
    try:
        yield
    finally:
        _stop(master)


def start_master(host: Host, address: str, *flags: str) -> subprocess.Popen[bytes]:
    """A master that listens on that address of the host."""
    ports = ["-rpc_port", str(MASTER_PORT), "-metrics_port", str(MASTER_PORT + 1)]
    here = ["-rpc_address", address, "-metrics_host", address]
    master = _start(host, "mooncake_master", *ports, *here, *flags)
    with host.inside():
        wait_for("Mooncake's master", lambda: _listens(address))
    return master


class StoreHost:
    """A host of its own with a master and store processes, which a test may end and start.

    The master forgets a store process that it has not heard of for ``ttl_s``.
    """

    def __init__(self, ttl_s: int = 10) -> None:
        require_mooncake()
        require_netns()
        self._ttl_s = ttl_s
        self._network = Network("store")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ports = itertools.count(MASTER_PORT + 10)

    def __enter__(self) -> Self:
        """Have a master and one store process there."""
        self._network.__enter__()
        self.host = self._network.hosts["store"]
        try:
            self.start_master()
            self.keeper = self.start_keeper()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            self.end(process)
        self._network.__exit__(None, None, None)

    def inside(self) -> AbstractContextManager[None]:
        """See Host."""
        return self.host.inside()

    def start_master(self) -> None:
        """Have another master, which knows nothing of the one before."""
        self.master = start_master(self.host, self.host.address, "-client_ttl", str(self._ttl_s))
        self._processes.append(self.master)
        with self.inside():
            wait_for("the master's figures", lambda: _listens(self.host.address, MASTER_PORT + 1))

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a process."""
        process.kill()
        process.wait(20)

    def start_keeper(self, size: str = "128 MB") -> subprocess.Popen[bytes]:
        """A store process that gives so much memory, once the master knows it."""
        before = self.given_bytes()
        way = ["-metadata_server", "P2PHANDSHAKE", "-master_server_address", f"{self.host.address}:{MASTER_PORT}"]
        flags = ["-host", self.host.address, "-port", str(next(self._ports)), "-global_segment_size", size]
        keeper = _start(self.host, "mooncake_client", *way, *flags)
        self._processes.append(keeper)
        wait_for("the store process", lambda: self.given_bytes() > before)
        return keeper

    def given_bytes(self) -> int:
        """How much memory the master's clients give to the store."""
        with self.inside(), urllib.request.urlopen(f"http://{self.host.address}:{MASTER_PORT + 1}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("master_total_capacity_bytes")))


def _start(host: Host, program: str, *flags: str) -> subprocess.Popen[bytes]:
    require_mooncake()
    (folder,) = importlib.import_module("mooncake").__path__
    return subprocess.Popen(
        host.command(str(Path(folder, program)), *flags),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _listens(address: str, port: int = MASTER_PORT) -> bool:
    with socket.socket() as probe:
        return not probe.connect_ex((address, port))


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(20)
