"""The API servers of one ``omni serve``: this process, and further hubs behind the same port as child processes.

Each is a hub of its own, with an id, keys and credits. The first has the embedded etcd, the local stages and the port
for operators. The kernel gives each new connection to one of those that listen (``SO_REUSEPORT``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from hub.api.door.keys import ApiKey
from omni_discovery.backoff import RestartPauses
from omni_discovery.commands.registry import child_environment
from omni_discovery.commands.stage_options import open_config
from omni_discovery.etcd.config import RegistrySecurity
from omni_discovery.receipts.asking import ask_process, path_of
from omni_discovery.records.waits import WaitKind

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from hub.api.door.config import DoorConfig
    from hub.orchestrator.deploy_versions import DeployVersions
    from hub.serve.running_hub import ServeConfig
    from omni_discovery.stories import Waits

logger = logging.getLogger(__name__)

#: The flag of a further server, with the descriptor of its ServerOptions.
SERVER_FLAG: Final = "--api-server-fd"
#: A server that is stopped gives open answers 5 s, and etcd a few more; one that takes so long hangs.
_KILL_S: Final = 30.0
#: When the last of them is told to stop, at the latest.
_ALL_STOPPED_S: Final = 10.0
_LOOK_S: Final = 0.05
#: Interval between signals to a server that has to hurry: two at once may reach it as one.
_HURRY_S: Final = 0.5
_NEVER_S: Final = float("inf")
#: How long a server may take to tell its metrics; and the first one, which asks the others for theirs.
_METRICS_S: Final = 2.0
_ALL_METRICS_S: Final = 4.0


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a further API server has from the first, beside the flags of the command. Secrets are in memory only."""

    number: int
    #: The first server.
    parent_pid: int
    #: The descriptor to write a byte to when it listens.
    ready_fd: int
    port: int
    endpoints: str
    #: Whether that is an embedded etcd, of which nothing is worth keeping.
    is_embedded: bool
    security: RegistrySecurity
    #: The deploy document that the first server serves, as stored in the registry.
    document: bytes
    keys: tuple[ApiKey, ...] = ()
    admin_token: ApiKey | None = None
    metrics_token: ApiKey | None = None
    #: Whether the first server has a port of its own for metrics.
    metrics_moved: bool = False

    def door(self, by_flags: DoorConfig) -> DoorConfig:
        """The settings of this server's door."""
        return replace(
            by_flags,
            keys=self.keys,
            admin_token=self.admin_token,
            metrics_token=self.metrics_token,
            metrics_moved=self.metrics_moved,
        )


def without_first(arguments: argparse.Namespace, options: ServerOptions) -> None:
    """Change the flags of the command to those of a further server: what only the first one does goes.

    Files with keys are not read again: all servers have those of the first.
    """
    ours: dict[str, Any] = {
        "etcd_endpoints": options.endpoints,
        "port": options.port,
        "hub_only": True,
        **dict.fromkeys(("stage_id", "omni_dp_size_local", "stage_overrides", "init_timeout", "demo_fd")),
        **dict.fromkeys(("metrics_port", "metrics_token_file", "admin_token_file", "api_key_fd")),
        # A port of its own, where there is one: receipts of requests are at the hub that had them.
        "admin_port": None if arguments.admin_port is None else 0,
        "dashboard_open": False,
        "api_key": [],
        "api_key_file": [],
    }
    vars(arguments).update(ours)


@dataclass(slots=True)
class _Further:
    """One further server, over all its processes. ``child`` is None between two of them."""

    number: int
    child: subprocess.Popen[bytes] | None = None
    #: From which the byte of ``child`` is read; -1 once it has come.
    ready_fd: int = -1
    pauses: RestartPauses = field(default_factory=RestartPauses)
    #: When to start, while ``child`` is None; monotonic, as the other moments.
    start_at_s: float = _NEVER_S
    began_s: float = 0.0
    #: Since when ``child`` listens; None before that.
    up_since_s: float | None = None
    was_up: bool = False

    @property
    def name(self) -> str:
        """How ``omni status`` calls it."""
        return f"api-server-{self.number}"

    def close_ready(self) -> None:
        """Close the descriptor, if there is one."""
        if self.ready_fd >= 0:
            os.close(self.ready_fd)
        self.ready_fd = -1


class ApiServers:
    """Starts, restarts and stops the further servers. Used from one thread: the kernel ends the children with it."""

    def __init__(
        self,
        config: ServeConfig,
        endpoints: str,
        port: int,
        releases: DeployVersions,
        waits: Waits | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._endpoints, self._port = config, endpoints, port
        #: Has the document that is served now.
        self._releases = releases
        #: Receives which servers wait to be started again, for ``omni doctor``.
        self._waits = waits
        self._now = now
        self._servers = [_Further(number) for number in range(1, config.api_servers)]
        self._hurries = asyncio.Event()

    def start(self) -> None:
        """Start all of them."""
        for server in self._servers:
            self._start(server)

    def restart_ended(self) -> None:
        """Restart servers after their backoff. Call it twice a second."""
        for server in self._servers:
            if server.child is None:
                if self._now() >= server.start_at_s:
                    self._start(server)
                continue
            self._look_if_ready(server)
            if (code := server.child.poll()) is not None:
                self._ended(server, code)

    def missing(self) -> str:
        """Which servers have not listened yet since the start of the first; empty once all have."""
        numbers = [str(server.number) for server in self._servers if not server.was_up]
        return f"API servers {', '.join(numbers)} do not listen yet" if numbers else ""

    def asks(self) -> Mapping[int, Callable[[], str]]:
        """What asks each server that listens for its metrics, by its number."""
        config = self._config
        return {
            server.number: partial(_metrics_of, config.runtime_dir, config.namespace, server.child.pid)
            for server in self._servers
            if server.child is not None and server.up_since_s is not None
        }

    async def stop(self) -> None:
        """Stop one after the other: the rest goes on accepting meanwhile. Idempotent. ``hurry`` shortens it.

        One that takes longer than its share of the time does not hold up the next one.
        """
        children = {server.number: server.child for server in self._servers if server.child is not None}
        for server in self._servers:
            server.child, server.start_at_s = None, _NEVER_S
            server.close_ready()
        hurried = asyncio.create_task(self._hurries.wait())
        stops: list[asyncio.Task[None]] = []
        for number, child in children.items():
            stops.append(asyncio.create_task(self._stop(number, child)))
            share_s = _ALL_STOPPED_S / len(children)
            await asyncio.wait({stops[-1], hurried}, timeout=share_s, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*stops)
        hurried.cancel()

    def hurry(self) -> None:
        """Have ``stop``, now or later, stop all at once and give open answers no time."""
        self._hurries.set()

    # ---- one server

    def _start(self, server: _Further) -> None:
        server.start_at_s, server.up_since_s, server.began_s = _NEVER_S, None, self._now()
        server.close_ready()
        try:
            server.ready_fd, server.child = self._spawn(server.number)
        except OSError as error:
            # A lack of processes or memory must not end the others: retried like any other end.
            logger.error("api_server.not_started number=%d: %s", server.number, error)
            server.start_at_s = self._now() + server.pauses.ended(0.0)
            return
        logger.info("api_server.starting number=%d pid=%d", server.number, server.child.pid)

    def _spawn(self, number: int) -> tuple[int, subprocess.Popen[bytes]]:
        """Start a process: the command of this one, with what it can't know in anonymous memory."""
        config = self._config
        with contextlib.ExitStack() as stack:
            ready_fd, theirs = os.pipe()
            stack.callback(os.close, theirs)
            undo = stack.enter_context(contextlib.ExitStack())
            undo.callback(os.close, ready_fd)
            os.set_blocking(ready_fd, False)
            options = ServerOptions(
                number=number,
                parent_pid=os.getpid(),
                ready_fd=theirs,
                port=self._port,
                endpoints=self._endpoints,
                is_embedded=config.endpoints is None,
                security=config.security,
                document=self._releases.document,
                keys=config.door.keys,
                admin_token=config.door.admin_token,
                metrics_token=config.door.metrics_token,
                metrics_moved=config.door.metrics is not None,
            )
            options_fd = open_config(options)
            stack.callback(os.close, options_fd)
            child = subprocess.Popen(
                [sys.executable, *sys.orig_argv[1:], SERVER_FLAG, str(options_fd)],
                stdin=subprocess.DEVNULL,
                pass_fds=(options_fd, theirs),
                env=child_environment(),
                # Ctrl-C in a terminal is for the first server, which stops the others.
                start_new_session=True,
            )
            undo.pop_all()
            return ready_fd, child

    def _look_if_ready(self, server: _Further) -> None:
        if server.ready_fd < 0 or server.child is None:
            return
        try:
            told = os.read(server.ready_fd, 1)
        except BlockingIOError:
            return
        server.close_ready()
        if told:
            server.up_since_s, server.was_up = self._now(), True
            if self._waits is not None:
                self._waits.end(server.name)
            text = "api_server.ready number=%d pid=%d after_s=%.1f"
            logger.info(text, server.number, server.child.pid, server.up_since_s - server.began_s)

    def _ended(self, server: _Further, code: int) -> None:
        server.child = None
        now_s = self._now()
        # With 0, somebody has told it to stop: that is no crash.
        was_well = code == 0
        served_s = 0.0 if server.up_since_s is None else now_s - server.up_since_s
        pause_s = server.pauses.ended(_NEVER_S if was_well else served_s)
        server.up_since_s, server.start_at_s = None, now_s + pause_s
        text = "api_server.ended number=%d exit_code=%d next_try_s=%.1f: it is started again then; the others go on"
        logger.log(logging.INFO if was_well else logging.ERROR, text, server.number, code, pause_s)
        if self._waits is not None:
            reason = f"it ended with exit code {code} and is started again after {pause_s:.1f} s"
            # Until it listens: so one that ends again and again is seen to wait for long.
            self._waits.begin(server.name, f"API server {server.number} of a hub", reason, WaitKind.RESTART)

    async def _stop(self, number: int, child: subprocess.Popen[bytes]) -> None:
        began_s = self._now()
        signalled_s: float | None = None
        while child.poll() is None:
            now_s = self._now()
            if now_s - began_s >= _KILL_S:
                logger.warning("api_server.killed number=%d after_s=%.0f", number, _KILL_S)
                child.kill()
                child.wait()
                return
            if signalled_s is None or (self._hurries.is_set() and now_s - signalled_s >= _HURRY_S):
                # The second one ends open answers at once.
                child.send_signal(signal.SIGTERM)
                signalled_s = now_s
            await asyncio.sleep(_LOOK_S)
        text = "api_server.stopped number=%d exit_code=%d after_s=%.1f"
        logger.info(text, number, child.returncode, self._now() - began_s)


def asks_first(options: ServerOptions, folder: Path, namespace: str) -> Mapping[int, Callable[[], str]]:
    """What asks the first server for the metrics of all servers but this one."""
    path = path_of("metrics", asker=options.number)
    return {0: partial(_metrics_of, folder, namespace, options.parent_pid, path, _ALL_METRICS_S)}


def tell_ready(options: ServerOptions) -> None:
    """Tell the first server that this one listens."""
    with contextlib.suppress(OSError), os.fdopen(options.ready_fd, "wb") as told:
        told.write(b"1")


def _metrics_of(
    folder: Path, namespace: str, pid: int, path: str = path_of("metrics"), timeout_s: float = _METRICS_S
) -> str:
    answer: dict[str, Any] = ask_process(folder, namespace, pid, path, timeout_s)
    return str(answer.get("metrics", ""))
