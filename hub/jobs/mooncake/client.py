"""MooncakeClient: objects of a Mooncake store, by way of a process that is started when it is needed."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from hub.jobs.errors import JobStoreUnavailableError
from hub.jobs.mooncake.frames import StoreAnswer, StoreCall, receive, send
from omni_discovery.commands.registry import child_environment
from omni_discovery.errors import ConfigError

if TYPE_CHECKING:
    from hub.jobs.config import MooncakeMaster

logger = logging.getLogger(__name__)

#: The longest wait for one answer. Without its master, the library takes four seconds to say so.
_CALL_S: Final = 10.0
_START_S: Final = 60.0
_REACH_S: Final = 3.0
#: How long calls fail at once after one that found the store away.
_PAUSE_S: Final = 2.0
_COMMAND: Final = (sys.executable, "-P", "-m", "hub.jobs.mooncake.client_process")
_INSTALL: Final = "pip install 'omni-discovery[job-store]', and Debian's libibverbs1"


@dataclass(slots=True)
class _Process:
    """The process, and this side of its socket."""

    process: subprocess.Popen[bytes]
    end: socket.socket
    is_connected: bool = False


class MooncakeClient:
    """The objects of one store. Thread-safe: one call at a time. Every call ends within seconds.

    Calls raise JobStoreUnavailableError if the store can't be reached, or has no room.
    """

    def __init__(self, master: MooncakeMaster) -> None:
        self._master = master
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._is_closed = False
        #: Why calls fail at once, until that moment of the monotonic clock.
        self._reason = ""
        self._again_at_s = 0.0

    def start(self) -> None:
        """Start the process; the store itself may be away. Raise ConfigError if Mooncake can't be loaded."""
        with self._lock:
            try:
                self._process = self._started()
            except OSError as error:
                raise ConfigError(f"--job-store: Mooncake's client does not start: {error}") from error

    def put(self, name: str, content: bytes) -> bool:
        """Store an object; False if it can't have this name at the moment."""
        return self._call(StoreCall("put", name, content=content)).count > 0

    def get(self, name: str) -> bytes | None:
        """The content of an object; None if there is none of this name."""
        answer = self._call(StoreCall("get", name))
        return answer.content if answer.count else None

    def remove_matching(self, pattern: str) -> int:
        """Remove all objects in whose names the pattern is found; return how many."""
        return self._call(StoreCall("remove", pattern)).count

    def close(self) -> None:
        """End the process, also under a call. Idempotent."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.process.kill()
        with self._lock:
            self._end()

    def _call(self, call: StoreCall) -> StoreAnswer:
        with self._lock:
            if self._is_closed:
                raise JobStoreUnavailableError("this hub is stopping")
            if time.monotonic() < self._again_at_s:
                raise JobStoreUnavailableError(self._reason)
            try:
                answer = self._answer(call)
            except TimeoutError:
                raise self._lost(f"the job store has not answered within {_CALL_S:g} s") from None
            except (OSError, ConfigError, msgspec.DecodeError) as error:
                raise self._lost(f"the job store can't be asked: {error}") from error
            if answer.is_lost:
                raise self._lost(f"the job store can't be reached: {answer.error}")
            if self._reason:
                self._reason = ""
                logger.info("jobs.store_back master=%s", self._master)
            if answer.error:
                raise JobStoreUnavailableError(f"the job store can't do it: {answer.error}")
            return answer

    def _answer(self, call: StoreCall) -> StoreAnswer:
        process = self._connected()
        try:
            return _ask(process, call)
        except ConnectionError:
            # The process has ended, by itself or by somebody's hand: the store may be well.
            self._end()
            return _ask(self._connected(), call)

    def _connected(self) -> _Process:
        process = self._process
        if process is None or not process.is_connected:
            # First of all: without a master, the library would wait for one for ever.
            master, own = self._reached()
            process = self._process = process or self._started()
            answer = _ask(process, StoreCall("connect", master, own))
            if answer.error:
                raise ConnectionError(answer.error)
            process.is_connected = True
        return process

    def _reached(self) -> tuple[str, str]:
        """The address of the master, and this host's on the way there. Raise OSError."""
        found = socket.getaddrinfo(self._master.host, self._master.port, socket.AF_INET, socket.SOCK_STREAM)
        with socket.socket(socket.AF_INET) as probe:
            probe.settimeout(_REACH_S)
            probe.connect(found[0][4])
            (address, port), (own, _) = probe.getpeername(), probe.getsockname()
        return f"{address}:{port}", own

    def _started(self) -> _Process:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                _COMMAND,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=child_environment(),
                # Ctrl-C in the terminal must not reach it: the hub still gives its jobs back.
                start_new_session=True,
            )
        started = _Process(process, ours)
        try:
            answer = msgspec.msgpack.decode(receive(ours, time.monotonic() + _START_S), type=StoreAnswer)
        except BaseException:
            _stop(started)
            raise
        if answer.error:
            _stop(started)
            raise ConfigError(f"--job-store: Mooncake can't be loaded ({answer.error}): {_INSTALL}")
        return started

    def _lost(self, reason: str) -> JobStoreUnavailableError:
        """The error for a reason, which all calls get for a moment. The process ends, whatever it waits for."""
        self._end()
        if not self._reason and not self._is_closed:
            logger.warning("jobs.store_away master=%s reason=%s", self._master, reason)
        self._reason, self._again_at_s = reason, time.monotonic() + _PAUSE_S
        return JobStoreUnavailableError(reason)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _stop(process)


def _ask(process: _Process, call: StoreCall) -> StoreAnswer:
    deadline_s = time.monotonic() + _CALL_S
    send(process.end, call, deadline_s)
    return msgspec.msgpack.decode(receive(process.end, deadline_s), type=StoreAnswer)


def _stop(process: _Process) -> None:
    process.process.kill()
    process.process.wait()
    process.end.close()
