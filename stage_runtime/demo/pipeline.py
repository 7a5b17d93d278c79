"""A pipeline of a demo: its hub as a child process, started, shown while it loads, and stopped with nothing left."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final
from urllib.parse import quote

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table

from omni_discovery.clients import OmniCoordClientForHub
from omni_discovery.commands.tables import replica_table
from omni_discovery.errors import ConfigError
from omni_discovery.etcd.embedded import find_binary
from omni_discovery.etcd.embedded_file import read_embedded, remove_endpoint
from omni_discovery.processes import check_unshared
from omni_discovery.records.schema import ReplicaStatus
from omni_discovery.view.hub_reports import HubReports
from stage_runtime.demo.http_client import DemoError, get_text
from stage_runtime.demo.killing import ReplicaKiller
from stage_runtime.demo.processes import alive, descendants
from stage_runtime.demo.show import ask_step, next_steps

if TYPE_CHECKING:
    from omni_discovery.records.schema import ReplicaInfo
    from omni_discovery.view.table import View

_READY_S: Final = 600.0
_STOP_S: Final = 90.0
_DASHBOARD: Final = re.compile(r"hub\.dashboard url=(\S+)")


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """The settings of one demo."""

    output: Path
    keep: bool
    port: int
    requests: int
    namespace: str
    runtime_dir: Path
    #: With a talker and a vocoder.
    speak: bool = False


def make_output(folder: Path) -> None:
    """Make the folder for what a demo writes. Raise ConfigError if that can't be, or if others can write there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"can't write to --output {folder}: {error.strerror}") from error
    try:
        check_unshared(folder)
    except ConfigError as error:
        text = f"--output {folder}: {error}, who could lead what is written there to another file: name a folder"
        raise ConfigError(f"{text} that is yours alone") from error


#: Where no terminal shows a live table, a line is written so often where it changes, and else so often, in seconds.
_PLAIN_S: Final = 5.0
_REPEAT_S: Final = 30.0
_BAR: Final = 40


#: The hub of a demo begins with its replicas: what it has to report of them is no news yet.
_NOTHING_REPORTED: Final = HubReports({}, (), {}, ())


class _PlainProgress:
    """Lines that say how far a wait is, where the output is no terminal: a live table would not be seen there."""

    def __init__(self, console: Console, begin_s: float) -> None:
        self._console = console
        self._begin_s = begin_s
        self._told_at_s = float("-inf")
        self._told = ""

    def tell(self, text: str) -> None:
        """Say what is waited for now; written every few seconds, and more seldom while it is the same."""
        now_s = time.monotonic()
        due_s = _REPEAT_S if text == self._told else _PLAIN_S
        if not self._console.is_terminal and now_s - self._told_at_s >= due_s:
            self._told_at_s, self._told = now_s, text
            self._console.print(f"{text} ({now_s - self._begin_s:.0f} s)", markup=False, soft_wrap=True)


def replicas_line(view: View, expected: int) -> str:
    """How many replicas are up, and how far the others are that are there."""
    infos = [info for _, info in sorted(view.replicas.items())]
    coming = [info for info in infos if info.status is not ReplicaStatus.UP]
    told = [f"{len(infos) - len(coming)} of {expected} up", *map(_how_far, coming)]
    return ", ".join(told)


def _how_far(info: ReplicaInfo) -> str:
    progress = f" {info.progress:.0%}" if info.progress else ""
    return f"{info.name} {info.status}{progress} {info.phase}".rstrip()


def share_up(view: View, expected: int) -> float:
    """How far all replicas are together, from 0 to 1: one that starts counts by the progress that it tells."""
    done = [
        1.0 if info.status is ReplicaStatus.UP else info.progress * (info.status is ReplicaStatus.STARTING)
        for info in view.replicas.values()
    ]
    return min(1.0, sum(done) / max(1, expected))


def progress_line(text: str, share: float) -> Table:
    """A line with a spinner, the text, and a bar that is full at a share of 1."""
    line = Table.grid(padding=(0, 2))
    line.add_row(Spinner("dots", text=text), ProgressBar(1.0, share, _BAR))
    return line


class DemoPipeline:
    """One run. The hub is a child process; all other processes are the hub's children."""

    #: What the page of the dashboard begins with.
    question: ClassVar[str] = "what is 26 + 48?"

    def __init__(
        self, config: DemoConfig, console: Console, stack: ExitStack, flags: Sequence[str], expected: int
    ) -> None:
        self._config = config
        self._console = console
        self._stack = stack
        self._flags = flags
        self._log = config.output / "serve.log"
        self._expected = expected
        self._begin_s = time.monotonic()
        self._ready_s = 0.0
        #: Processes that the demo has killed; their records exist until their leases expire.
        self._killed: set[int] = set()
        self._url = ""
        self._endpoint = ""
        #: What opens the dashboard of a demo that is kept; nobody else is told.
        self._token = secrets.token_urlsafe(16)

    def start(self, title: str) -> None:
        """Start ``omni serve`` in a session of its own: Ctrl-C reaches the demo only, which stops the hub in order."""
        self._console.rule(title, align="left")
        log = self._stack.enter_context(self._log.open("wb"))
        command = [
            *(sys.executable, "-P", "-m", "omni_discovery", "serve"),
            *self._flags,
            *("--port", str(self._config.port)),
            *("--namespace", self._config.namespace),
            *("--parent-pid", str(os.getpid())),
        ]
        environment = {name: value for name, value in os.environ.items() if name != "OMNI_ETCD_ENDPOINTS"}
        passed: tuple[int, ...] = ()
        if self._config.keep:
            # Who keeps it serving can look at it, and kill what is behind it.
            killer = ReplicaKiller(lambda: descendants(self._hub.pid)[1:], self._killed.add)
            self._stack.callback(killer.close)
            passed = (killer.hub_end.fileno(),)
            command += ["--admin-port", "0", "--demo-fd", str(passed[0])]
            environment["OMNI_ADMIN_TOKEN"] = self._token
        self._hub = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=environment,
            pass_fds=passed,
        )
        if passed:
            killer.hub_end.close()

    def wait_until_ready(self, first: str = "starting an embedded etcd and the hub") -> None:
        """Show the table of replicas until all stages are ready; before that, ``first``. Raise DemoError."""
        plain = _PlainProgress(self._console, self._begin_s)
        with Live(console=self._console, refresh_per_second=8, transient=True) as live:
            live.update(Spinner("dots", text=first))
            plain.tell(first)
            while (embedded := read_embedded(self._config.runtime_dir, self._config.namespace)) is None:
                self._check_still_starting()
                plain.tell(first)
                time.sleep(0.05)
            self._endpoint = embedded.endpoint
            client = OmniCoordClientForHub(self._endpoint, namespace=self._config.namespace)
            self._client = self._stack.enter_context(client)
            while not self._all_up():
                self._check_still_starting()
                view = client.view()
                plain.tell(f"loading the models: {replicas_line(view, self._expected)}")
                waited = f"loading the models · {time.monotonic() - self._begin_s:.0f} s"
                live.update(Group(progress_line(waited, share_up(view, self._expected)), self._table(view)))
                time.sleep(0.1)
            self._url = next(iter(client.view().hubs.values())).address
            while get_text(f"{self._url}/ready")[0] != 200:
                self._check_still_starting()
                time.sleep(0.05)
        self._ready_s = time.monotonic() - self._begin_s
        self._console.print(self._table(self._client.view()))
        self._console.print(f"ready after {self._ready_s:.1f} s at [bold]{self._url}[/]\n")

    def _table(self, view: View) -> Table:
        return replica_table(view, self._config.namespace, time.time(), self._console.width, _NOTHING_REPORTED)

    def keep_serving(self) -> None:
        """Print commands to try and serve until Ctrl-C. Raise DemoError if the hub ends."""
        self._console.print("\nserving until Ctrl-C. A dashboard, where you can ask and kill a replica meanwhile:\n")
        link = f"{self._dashboard()}#token={self._token}&ask={quote(self.question)}"
        self._console.print(f"{link}\n", soft_wrap=True, markup=False, style="cyan")
        self._console.print("or try in another terminal:\n")
        first = self.first_step()
        for line in next_steps(first, _omni(), _etcdctl(), self._endpoint, self._config.namespace):
            self._console.print(line + "\n", soft_wrap=True, markup=False, style="cyan")
        self._hub.wait()
        raise DemoError(f"the hub ended by itself; {self._log_end()}")

    def _dashboard(self) -> str:
        """The URL of the hub's dashboard, from its log. Raise DemoError."""
        found = _DASHBOARD.search(self._log.read_text(encoding="utf-8", errors="replace"))
        if found is None:
            raise DemoError(f"the hub has no dashboard; {self._log_end()}")
        return found[1]

    def first_step(self) -> str:
        """The first command to try: a request."""
        return ask_step(self._url)

    def stop(self) -> None:
        """Stop the hub, which stops its children, and check that no process is left."""
        pids = descendants(self._hub.pid)
        self._hub.send_signal(signal.SIGTERM)
        with self._console.status("stopping"):
            try:
                self._hub.wait(_STOP_S)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                self._hub.kill()
                # The killed hub can't remove its endpoint file.
                remove_endpoint(self._config.runtime_dir, self._config.namespace, self._hub.pid)
                self._hub.wait()
        deadline_s = time.monotonic() + 5
        while (left := alive(pids)) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        self._console.print(f"[red]still running: {left}[/]" if left else "stopped; no process is left")

    def _replicas(self) -> list[ReplicaInfo]:
        view = self._client.view()
        return [
            info
            for _, info in sorted(view.replicas.items())
            if info.status is ReplicaStatus.UP and info.pid not in self._killed
        ]

    def _all_up(self) -> bool:
        return len(self._replicas()) == self._expected

    def _wait_all_up(self, limit_s: float) -> None:
        """Wait for what was killed to come back; say so if it does not."""
        with self._console.status("the supervisors restart what was killed"):
            deadline_s = time.monotonic() + limit_s
            while not self._all_up() and time.monotonic() < deadline_s:
                time.sleep(0.2)
        if not self._all_up():
            self._console.print(f"[yellow]not all replicas are back after {limit_s:.0f} s; see {self._log}[/]")

    def _check_still_starting(self) -> None:
        if self._hub.poll() is not None:
            raise DemoError(f"the hub ended while it started; {self._log_end()}")
        if time.monotonic() - self._begin_s > _READY_S:
            raise DemoError(f"not ready after {_READY_S:.0f} s; {self._log_end()}")

    def _log_end(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return f"see {self._log}. Its end:\n  " + "\n  ".join(lines[-8:])


def _omni() -> str:
    """The ``omni`` command: its name if the shell finds it, else its path."""
    beside = Path(sys.executable).with_name("omni")
    return "omni" if shutil.which("omni") == str(beside) or not beside.exists() else str(beside)


def _etcdctl() -> str:
    """The path of etcdctl: the one in PATH, else the one of the embedded etcd."""
    return shutil.which("etcdctl") or str(find_binary(None).with_name("etcdctl"))
