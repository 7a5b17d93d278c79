"""Mooncake's real package, on a host of the tests' own: its engines and its master listen on every address there is."""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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


def start_master(host: Host, address: str) -> subprocess.Popen[bytes]:
    """A master that listens on that address of the host."""
    require_mooncake()
    (folder,) = importlib.import_module("mooncake").__path__
    ports = ["-rpc_port", str(MASTER_PORT), "-metrics_port", str(MASTER_PORT + 1)]
    here = ["-rpc_address", address, "-metrics_host", address]
    master = subprocess.Popen(
        host.command(str(Path(folder, "mooncake_master")), *ports, *here),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with host.inside():
        wait_for("Mooncake's master", lambda: _listens(address))
    return master


def _listens(address: str) -> bool:
    with socket.socket() as probe:
        return not probe.connect_ex((address, MASTER_PORT))


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(20)
