"""Mooncake's real package, on a host of the tests' own: its engines and its master listen on every address there is."""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import socket
import subprocess
from pathlib import Path

from tests.support.binaries import absent
from tests.support.netns import Host, Network, require_netns
from tests.support.processes import wait_for

#: It tells much otherwise.
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")


#: Where the master listens on that host: where connectors look for it unless they are told.
MASTER_PORT = 50051


@functools.cache
def mooncake_host() -> Host:
    """The host on which Mooncake may run: one for the whole test run, as an engine stays in its process to the end."""
    try:
        importlib.import_module("mooncake.engine")
    except ImportError as error:
        absent(f"Mooncake can't be imported ({error}): .[mooncake] and libibverbs1 are wanted")
    require_netns()
    network = Network("mooncake")
    network.__enter__()
    atexit.register(network.__exit__, None, None, None)
    return network.hosts["mooncake"]


@functools.cache
def mooncake_master() -> None:
    """Have a master on that host, to the end of the run."""
    host = mooncake_host()
    (folder,) = importlib.import_module("mooncake").__path__
    ports = ["-rpc_port", str(MASTER_PORT), "-metrics_port", str(MASTER_PORT + 1)]
    here = ["-rpc_address", "127.0.0.1", "-metrics_host", "127.0.0.1"]
    master = subprocess.Popen(
        host.command(str(Path(folder, "mooncake_master")), *ports, *here),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    atexit.register(_stop, master)
    with host.inside():
        wait_for("Mooncake's master", _listens)


def _listens() -> bool:
    with socket.socket() as probe:
        return not probe.connect_ex(("127.0.0.1", MASTER_PORT))


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(20)
