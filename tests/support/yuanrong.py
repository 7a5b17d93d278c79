"""A real Yuanrong datasystem with an etcd of its own, on loopback only; one for all tests of a run."""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from omni_discovery.etcd.embedded import EmbeddedEtcd
from tests.support.binaries import absent
from tests.support.host_etcd import REGISTRY_PORT
from tests.support.netns import Host, Network
from tests.support.processes import wait_for

_PACKAGE = "openyuanrong-datasystem"
#: Where connectors look for it unless they are told.
DEFAULT_PORT = 35001


class Datasystem:
    """The process. It ends with this one at the latest, however that ends. ``on`` another host, it is reached there."""

    def __init__(self, memory_mib: int, etcd: str = "", on: Host | None = None) -> None:
        self._stack = ExitStack()
        self._folder = Path(tempfile.mkdtemp(prefix="omni-yr-"))
        self._stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
        # Clients of this process and of its children write their logs there, and not into the user's home.
        os.environ["DATASYSTEM_CLIENT_LOG_DIR"] = str(self._folder / "clients")
        self.host, self.port = ("127.0.0.1", _free_port()) if on is None else (on.address, DEFAULT_PORT)
        try:
            self.etcd = etcd or self._stack.enter_context(EmbeddedEtcd()).endpoint
            self.process = self._start(self.etcd, memory_mib, on)
            self._stack.callback(self.kill)
        except BaseException:
            self.close()
            raise

    def wait(self) -> None:
        """Until it can be used."""
        ready = self._folder / "probe" / "ready"
        wait_for("Yuanrong's datasystem", lambda: ready.exists() or self.process.poll() is not None, 90.0)
        assert self.process.poll() is None, (self._folder / "log").read_text(errors="replace")[-3000:]

    @property
    def settings(self) -> dict[str, Any]:
        """What a connector's ``extra`` says of it."""
        return {"host": self.host, "port": self.port, "get_sub_timeout_ms": 50}

    def kill(self) -> None:
        """End it as the kernel does when memory runs out. Idempotent."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End it and its etcd, and remove what they wrote. Idempotent."""
        self._stack.close()

    def _start(self, etcd: str, memory_mib: int, on: Host | None) -> subprocess.Popen[bytes]:
        found = importlib.util.find_spec("yr.datasystem")
        assert found is not None
        assert found.origin is not None
        package = Path(found.origin).parent
        flags = {"worker_address": f"{self.host}:{self.port}", "etcd_address": etcd, "log_monitor": "false"}
        flags["shared_memory_size_mb"] = str(memory_mib)
        # As its own start command does it, which leaves a process that nobody owns: paths below one folder.
        for name, setting in json.loads((package / "worker_config.json").read_text()).items():
            if str(setting.get("value", "")).startswith("./datasystem/"):
                flags[name] = str(self._folder / setting["value"].removeprefix("./datasystem/"))
        command = ["setpriv", "--pdeathsig", "KILL", "env", f"LD_LIBRARY_PATH={package / 'lib'}"]
        command.append(str(package / "datasystem_worker"))
        command += [f"--{name}={value}" for name, value in flags.items()]
        with (self._folder / "log").open("wb") as log:
            return subprocess.Popen(
                command if on is None else on.command(*command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )


@contextmanager
def datasystems_on(network: Network) -> Iterator[None]:
    """One on each host but the registry's; they find each other through the etcd there."""
    etcd = f"{network.hosts['registry'].address}:{REGISTRY_PORT}"
    with ExitStack() as stack:
        made = []
        for name, host in network.hosts.items():
            if name != "registry":
                made.append(Datasystem(256, etcd, host))
                stack.callback(made[-1].close)
        for each in made:
            each.wait()
        yield


def yuanrong_installed() -> bool:
    """Whether the package is there."""
    try:
        return importlib.util.find_spec("yr.datasystem") is not None
    except ModuleNotFoundError:
        return False


def require_yuanrong() -> None:
    """The package is there, or the test is not run."""
    if not yuanrong_installed():
        absent(f"{_PACKAGE} is not installed: pip install 'omni-discovery[yuanrong]'")


def yuanrong() -> Datasystem:
    """The one of this run, when it can be used."""
    made = start_yuanrong()
    made.wait()
    return made


@cache
def start_yuanrong() -> Datasystem:
    """Start the one of this run. It takes some 6 s, most of which it waits for others of its kind."""
    require_yuanrong()
    # Room for two of the largest hand-offs; it takes memory only for what is stored.
    made = Datasystem(memory_mib=4096 if os.environ.get("OMNI_LONG") else 1024)
    atexit.register(made.close)
    return made


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
