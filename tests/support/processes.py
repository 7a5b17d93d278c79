"""Start the product's own commands as child processes, wait for them within a bound, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from stage_runtime.demo.processes import alive, descendants
from tests.support.netns import Host
from tests.support.quiet import patience_s

#: Variables that are defaults of flags: what a person has set is not for tests.
DEFAULTS = ("OMNI_ETCD_ENDPOINTS", "OMNI_NAMESPACE", "VLLM_API_KEY", "OMNI_ADMIN_TOKEN")
OMNI = [sys.executable, "-m", "omni_discovery"]

_Found = TypeVar("_Found")


def most_mib(pid: int) -> int:
    """The most memory that a process has held."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) >> 10


def wait_for(what: str, probe: Callable[[], _Found | None], timeout_s: float = 30.0) -> _Found:
    """The first truthy value of the probe; fails with ``what`` when none comes in time."""
    limit_s = patience_s(timeout_s)
    deadline_s = time.monotonic() + limit_s
    while True:
        found = probe()
        if found:
            return found
        if time.monotonic() > deadline_s:
            raise AssertionError(f"waited {limit_s:.0f} s for {what}")
        time.sleep(0.05)


class Child:
    """One ``omni`` command, in a session of its own, with its output in a file; ``variables`` are set for it.

    ``python`` is another environment's, if it is to run there; ``module`` is run in place of ``omni_discovery``;
    ``host`` is a host of its own; ``prefix`` is a launcher that the command replaces.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        name: str = "omni",
        runtime_dir: Path | None = None,
        variables: Mapping[str, str] | None = None,
        python: Path | None = None,
        pass_fds: Sequence[int] = (),
        module: str = "omni_discovery",
        host: Host | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.log = folder / f"{name}.log"
        environment = {key: value for key, value in os.environ.items() if key not in DEFAULTS} | dict(variables or {})
        environment["XDG_RUNTIME_DIR"] = str(runtime_dir or folder)
        environment["XDG_STATE_HOME"] = str(folder / "state")
        is_usual = python is None and module == "omni_discovery"
        command = [*prefix, *(OMNI if is_usual else (str(python or sys.executable), "-m", module)), *arguments]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command if host is None else host.command(*command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                env=environment,
                start_new_session=True,
                pass_fds=tuple(pass_fds),
            )

    @property
    def text(self) -> str:
        """Everything it has printed so far."""
        return self.log.read_text(errors="replace")

    def must_run(self) -> None:
        """Fail with its last words if it has ended."""
        assert self.process.poll() is None, f"exit {self.process.returncode}:\n{self.text[-3000:]}"

    def tree(self) -> list[int]:
        """The process and all that came from it."""
        return descendants(self.process.pid)

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = 60.0) -> list[int]:
        """Send the signal and wait; return what is left of its tree a moment later."""
        tree = self.tree()
        if self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        deadline_s = time.monotonic() + 10
        while (left := alive(tree)) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return left
