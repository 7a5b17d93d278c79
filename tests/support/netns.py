"""Hosts on one machine: network namespaces that are joined by a switch, and that reach nothing else. Needs root.

Every name begins with this process's id. What a run that was killed has left is removed by the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tests.support.binaries import absent

_PREFIX: Final = "omni-test"
_SWITCH: Final = "switch"
_BRIDGE: Final = "bridge"
_RUN: Final = Path("/run/netns")
_CLONE_NEWNET: Final = 0x40000000
_NUMBERS = itertools.count()

#: A host has a name and a shared memory of its own; all else is this machine's.
_AS_HOST: Final = 'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && exec "$@"'


def require_netns() -> None:
    """Network namespaces can be made here."""
    probe = f"{_PREFIX}-{os.getpid()}-probe"
    try:
        _ip("netns", "add", probe)
        _ip("netns", "delete", probe)
    except OSError as error:
        absent(f"ip can't be run ({error}): apt-get install iproute2")
    except subprocess.CalledProcessError as error:
        absent(f"network namespaces need root: {error.stderr.strip()}")


@dataclass(frozen=True, slots=True)
class Host:
    """One of a network's hosts."""

    name: str
    namespace: str
    #: Its only address but loopback.
    address: str

    def command(self, *command: str) -> list[str]:
        """What runs a command there. It replaces its launcher: the process id is that of the command."""
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", _AS_HOST, self.name, *command]

    def run(self, *command: str) -> str:
        """Run a short command there; return what it prints."""
        return subprocess.run(
            self.command(*command), check=True, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
        ).stdout

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """What this thread opens meanwhile is a socket of that host, and stays one."""
        # One that is started in there would stay there, and all processes that come from it.
        forkserver.ensure_running()
        with Path("/proc/thread-self/ns/net").open("rb") as home, (_RUN / self.namespace).open("rb") as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(home.fileno())


class Network:
    """Hosts with the given names; ``hosts`` has them by name. Leaving it ends what still runs on them.

    ``subnet`` is the first three numbers of their addresses, ``first`` the last number of the first one.
    """

    def __init__(self, *names: str, subnet: str = "10.77.0", first: int = 1) -> None:
        own = f"{_PREFIX}-{os.getpid()}-{next(_NUMBERS)}"
        self._switch = f"{own}-{_SWITCH}"
        self.hosts = {
            name: Host(name, f"{own}-{name}", f"{subnet}.{number}") for number, name in enumerate(names, start=first)
        }
        self._stack = ExitStack()
        #: Process ids that the end of the network had to kill.
        self.left: list[int] = []

    def __enter__(self) -> Self:
        _remove_leftovers()
        try:
            self._make(self._switch)
            _ip("-n", self._switch, "link", "add", _BRIDGE, "type", "bridge")
            _ip("-n", self._switch, "link", "set", _BRIDGE, "up")
            for host in self.hosts.values():
                self._make(host.namespace)
                self._plug_in(host)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def cut(self, host: Host) -> None:
        """Nothing gets to it or from it any more, and nobody is told."""
        _ip("-n", self._switch, "link", "set", f"to-{host.name}", "nomaster")

    def join(self, host: Host) -> None:
        """Undo ``cut``."""
        _ip("-n", self._switch, "link", "set", f"to-{host.name}", "master", _BRIDGE)

    def join_bridge(self, bridge: str) -> None:
        """Plug the switch into a bridge of this machine, such as that of a Docker network with the same subnet."""
        # 15 characters at most; it goes with the switch's end.
        end = f"omni{os.getpid()}u{next(_NUMBERS)}"
        _ip("link", "add", end, "type", "veth", "peer", "name", "uplink", "netns", self._switch)
        _ip("-n", self._switch, "link", "set", "uplink", "master", _BRIDGE, "up")
        _ip("link", "set", end, "master", bridge, "up")

    def received_bytes(self, host: Host) -> int:
        """What the switch has sent to it so far."""
        found = json.loads(_ip("-n", self._switch, "-s", "-j", "link", "show", "dev", f"to-{host.name}"))
        return int(found[0]["stats64"]["tx"]["bytes"])

    def _make(self, namespace: str) -> None:
        _ip("netns", "add", namespace)
        self._stack.callback(lambda: self.left.extend(_remove(namespace)))
        _ip("-n", namespace, "link", "set", "lo", "up")

    def _plug_in(self, host: Host) -> None:
        plug = f"to-{host.name}"
        veth = ["link", "add", plug, "type", "veth", "peer", "name", "eth0", "netns", host.namespace]
        _ip("-n", self._switch, *veth)
        _ip("-n", self._switch, "link", "set", plug, "master", _BRIDGE, "up")
        _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
        _ip("-n", host.namespace, "link", "set", "eth0", "up")


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20).stdout


def _enter(file: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(file, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _remove(namespace: str) -> list[int]:
    """Kill what runs there and remove it; return who had to be killed."""
    pids = [int(pid) for pid in _ip("netns", "pids", namespace).split()]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _ip("netns", "delete", namespace)
    return pids


def _remove_leftovers() -> None:
    for namespace in _namespaces():
        owner = namespace.removeprefix(f"{_PREFIX}-").split("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            # Another run that starts now may be about to remove the same.
            with contextlib.suppress(subprocess.CalledProcessError):
                _remove(namespace)


def _namespaces() -> Sequence[str]:
    if not _RUN.is_dir():
        return []
    return sorted(entry.name for entry in _RUN.iterdir() if entry.name.startswith(f"{_PREFIX}-"))
