"""The supervisor: K local replicas of one stage, each in a process of its own.

One thread, one selector: the replicas' output, the signals, and the clock. Output is copied line by line, each with the
name of its replica. A replica that ends is restarted; the supervisor ends when no replica can be kept up.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import msgspec

from omni_discovery.deploy.document import DeployConfig, encode_deploy
from omni_discovery.logs.readiness import NotReady, ReadinessLog, Ready, StillMissing
from omni_discovery.metrics.samples import SAMPLE_INTERVAL_S, Sample, SupervisorSample
from omni_discovery.records.waits import WaitKind
from omni_discovery.stories import Waits
from stage_runtime.config import ReplicaConfig, SupervisorConfig
from stage_runtime.status_pipe import Exiting, Loading, Registered, Sampled, Up, split_line
from stage_runtime.supervisor.relay import LineBuffer, LineSource, relay_line
from stage_runtime.supervisor.restarts import EXIT_CONFIG, EXIT_DONE, EXIT_FAILED, LeaveDown, Restarts, StartAgain

logger = logging.getLogger(__name__)

_TICK_S: Final = 0.25
#: What is read of a pipe at a time, and how often at a replica's end: as much as a pipe may hold. Before that once in a
#: turn, so that one that prints without a pause keeps nobody from the others, the signals and the clock.
_READ_BYTES: Final = 65536
_MOST_READS: Final = 16
#: Pause before a replica is started again for which no file descriptor was left.
_DESCRIPTOR_PAUSE_S: Final = 2.0
#: Pause before what ended processes left is looked for again, where it could not be removed.
_TIDY_PAUSE_S: Final = 30.0


class Child(Protocol):
    """One replica process. ``output_fd`` is the read end of the pipe of its standard output and standard error."""

    output_fd: int

    @property
    def pid(self) -> int:
        """Its process id; 0 while that is not known. Known before anything that the replica prints."""

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""

    def send_signal(self, number: int) -> None:
        """Send a signal. Does nothing if the process has ended."""


class Launcher(Protocol):
    """Starts replica processes."""

    @property
    def phase(self) -> str:
        """What it is doing before a replica that it has started runs; empty for nothing."""

    def start(self, config: ReplicaConfig, environment: dict[str, str]) -> Child:
        """Start one replica. Raise OSError if the machine has no process, file or memory left."""

    def close(self) -> None:
        """Free the resources of the launcher. Idempotent."""


@dataclass(slots=True)
class _Slot:
    """One of the K replicas, over all its processes."""

    ordinal: int
    restarts: Restarts
    child: Child | None = None
    #: Since when the current process takes requests; None before that.
    up_since_s: float | None = None
    #: When to start the next process; infinity for never.
    start_at_s: float = 0.0
    output: LineBuffer = field(default_factory=LineBuffer)
    #: Whose lines these are: the current process, or the last one.
    source: LineSource = field(default_factory=lambda: LineSource(0))
    #: The name of the last process that was registered before the current one; empty if none was.
    former_replica: str = ""
    #: How far the current process is with its start, in its own words; empty if it has not said so yet.
    phase: str = ""
    #: The reason of the current process's Exiting message; empty without one.
    exit_reason: str = ""
    #: How the previous process ended.
    former_end: str = ""
    #: The replica id of the current process, as its last sample has it.
    replica_id: int | None = None

    @property
    def is_up(self) -> bool:
        """Whether the current process takes requests, under a name that hubs know."""
        return self.child is not None and self.up_since_s is not None and bool(self.source.replica)

    def describe(self) -> str:
        """What it is doing instead of serving; empty if that is not known."""
        if self.child is None:
            return "not running" if self.start_at_s == float("inf") else "waiting for another try"
        return self.phase if self.up_since_s is None else "registering"

    @property
    def pair(self) -> str:
        """How log lines name the current or last process; if it has no name, also by that of the one before."""
        is_named = self.source.replica or not self.former_replica
        return self.source.pair if is_named else f"{self.source.pair} was={self.former_replica}"

    def find_pid(self) -> None:
        """Ask again for the process id, which may not be known at the start."""
        if not self.source.pid and self.child is not None:
            self.source = replace(self.source, pid=self.child.pid)

    @property
    def is_hopeless(self) -> bool:
        """Whether no process runs and a restart is expected to fail, too."""
        return self.child is None and self.restarts.hopeless_code is not None

    @property
    def is_left_down(self) -> bool:
        """Whether no process runs and none will be started: an operator has drained the replica."""
        return self.child is None and self.start_at_s == float("inf")


class Supervisor:
    """Made and run in the main thread, which has the signal handlers.

    ``export`` is called with each sample of a replica, and with the supervisor's own once a second. Without it the
    replicas take no samples.
    """

    def __init__(
        self,
        config: SupervisorConfig,
        deploy: DeployConfig,
        launcher: Launcher,
        environment_of: Callable[[int], dict[str, str]],
        on_stop: Callable[[], None] = lambda: None,
        waits: Waits | None = None,
        export: Callable[[Sample], None] | None = None,
        shared_output_fd: int | None = None,
        tidy: Callable[[], bool] = lambda: True,
        leave_word: Callable[[str], None] = lambda _why: None,
    ) -> None:
        """``shared_output_fd``: the read end of a pipe for what the launcher's own process prints; None for none.

        ``tidy`` removes what processes left that were killed, and returns whether all is gone: called at the start and
        behind each end, and again while it is not. It never raises: what is left must not stop a start.
        ``leave_word`` gets why no replica can be kept up, when this supervisor is about to end for that.
        """
        self._config = config
        #: Receives which replicas wait to be started again, for ``omni doctor``; None: not told.
        self._waits = waits
        self._on_stop = on_stop
        known_pipeline = encode_deploy(deploy).decode("utf-8")
        self._replica_config = msgspec.structs.replace(
            config.replica,
            known_pipeline=known_pipeline,
            parent_pid=config.replica.parent_pid or os.getpid(),
            sampled=export is not None,
        )
        self._export = export
        self._export_at_s = 0.0
        self._restart_count = 0
        self._launcher = launcher
        self._environment_of = environment_of
        self._slots = [_Slot(ordinal, Restarts()) for ordinal in range(config.count)]
        self._selector = selectors.DefaultSelector()
        self._tidy = tidy
        self._leave_word = leave_word
        self._tidy_at_s = 0.0
        #: At the first look, replicas of a supervisor that was killed may be about to end.
        self._tidies_again = True
        self._shared = None if shared_output_fd is None else _SharedOutput(shared_output_fd)
        self._readiness = ReadinessLog(time.monotonic())
        #: When the remaining replicas are killed; None until this supervisor is stopped.
        self._kill_at_s: float | None = None

    def run(self) -> int:
        """Keep the replicas running until a signal, or until none can be kept up; return the exit code."""
        with _SignalPipe((signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)) as signals:
            self._selector.register(signals.receiver, selectors.EVENT_READ)
            if self._shared is not None:
                self._selector.register(self._shared.fd, selectors.EVENT_READ, self._shared)
            try:
                while self._kill_at_s is None or any(slot.child for slot in self._slots):
                    self._turn(signals)
                    if self._kill_at_s is None and all(slot.is_hopeless for slot in self._slots):
                        break
            finally:
                self._kill_all()
                self._launcher.close()
                self._tidy()
                self._selector.close()
                if self._waits is not None:
                    self._waits.close()
        if self._kill_at_s is not None:
            return EXIT_DONE
        return self._give_up()

    def _give_up(self) -> int:
        code = max(slot.restarts.hopeless_code or EXIT_DONE for slot in self._slots)
        if code != EXIT_DONE:
            why = "; ".join(dict.fromkeys(slot.former_end for slot in self._slots if slot.former_end))
            names = ",".join(name for slot in self._slots if (name := slot.source.replica or slot.former_replica))
            text = f"supervisor.gave_up stage=%d {f'replicas={names} ' if names else ''}code=%d: %s"
            # First, so that the reason is the last line of the log.
            self._leave_word(why)
            logger.error(text, self._config.replica.stage_id, code, why)
        return code

    def _turn(self, signals: _SignalPipe) -> None:
        now_s = time.monotonic()
        if self._config.parent_pid and os.getppid() != self._config.parent_pid and self._kill_at_s is None:
            logger.warning("supervisor.orphaned: draining")
            self._stop(now_s)
        if self._kill_at_s is None:
            self._tidy_due(now_s)
            self._start_due(now_s)
            self._tell_readiness(now_s)
        for key, _ in self._selector.select(self._wait_s(now_s)):
            if key.fileobj is signals.receiver:
                self._obey(signals.drain())
            elif isinstance(key.data, _SharedOutput):
                for line in key.data.read_lines():
                    self._print(LineSource(self._config.replica.stage_id), line)
            else:
                self._forward(key.data)
        for slot in self._slots:
            self._reap(slot)
        self._export_own(time.monotonic())
        if self._kill_at_s is not None and time.monotonic() >= self._kill_at_s:
            logger.error("supervisor.killing: the drain's bound has passed")
            self._kill_all()

    def _obey(self, numbers: bytes) -> None:
        for number in numbers:
            if number in (signal.SIGTERM, signal.SIGINT):
                self._stop(time.monotonic())

    def _export_own(self, now_s: float) -> None:
        if self._export is None or now_s < self._export_at_s:
            return
        self._export_at_s = now_s + SAMPLE_INTERVAL_S
        is_stopping = self._kill_at_s is not None
        sample = SupervisorSample(
            namespace=self._config.replica.namespace,
            stage_id=self._config.replica.stage_id,
            wanted=0 if is_stopping else sum(not slot.is_left_down for slot in self._slots),
            restarts=self._restart_count,
            replica_ids=tuple(slot.replica_id for slot in self._slots if slot.replica_id is not None),
        )
        self._export(sample)

    def _wait_s(self, now_s: float) -> float:
        due = [slot.start_at_s - now_s for slot in self._slots if slot.child is None]
        return max(0.0, min([_TICK_S, *due]))

    def _tidy_due(self, now_s: float) -> None:
        # Behind an end, the next start is not due yet.
        if now_s >= self._tidy_at_s:
            is_over = self._tidy() and not self._tidies_again
            self._tidy_at_s, self._tidies_again = float("inf") if is_over else now_s + _TIDY_PAUSE_S, False

    def _start_due(self, now_s: float) -> None:
        due = [slot for slot in self._slots if slot.child is None and now_s >= slot.start_at_s]
        for slot in due:
            self._start(slot, now_s)
        if started := sum(slot.child is not None for slot in due):
            phase = [self._launcher.phase] if self._launcher.phase else []
            text = "supervisor.starting stage=%d replicas=%d" + ": %s" * len(phase)
            logger.info(text, self._config.replica.stage_id, started, *phase)

    def _tell_readiness(self, now_s: float) -> None:
        """Log whether the stage can serve; a hub above this supervisor does that itself, for all stages."""
        if self._config.parent_pid:
            return
        stage_id = self._config.replica.stage_id
        up = [slot.source.replica for slot in self._slots if slot.is_up]
        phases = "" if up else self._phases()
        match self._readiness.observe(phases, now_s):
            case Ready(after_s):
                text = "stage.ready stage=%d replicas=%s up=%d of=%d after_s=%.1f"
                logger.info(text, stage_id, ",".join(up), len(up), len(self._slots), after_s)
            case NotReady():
                logger.warning("stage.not_ready stage=%d: %s", stage_id, phases)
            case StillMissing(after_s):
                logger.info("stage.waiting stage=%d after_s=%.1f: %s", stage_id, after_s, phases)
            case None:
                pass

    def _phases(self) -> str:
        """What the replicas are doing, for people: none of them is up."""
        phases = Counter(slot.describe() or self._launcher.phase or "starting" for slot in self._slots)
        return ", ".join(f"{count} {phase}" for phase, count in phases.items())

    def _start(self, slot: _Slot, now_s: float) -> None:
        config = msgspec.structs.replace(self._replica_config, ordinal=slot.ordinal, former_end=slot.former_end)
        slot.former_replica = slot.source.replica or slot.former_replica
        slot.up_since_s, slot.exit_reason, slot.phase, slot.source = None, "", "", LineSource(config.stage_id)
        slot.start_at_s = float("inf")
        if self._waits is not None:
            self._waits.end(str(slot.ordinal))
        try:
            slot.child = self._launcher.start(config, self._environment_of(slot.ordinal))
        except OSError as error:
            # A lack of processes, files or memory must not cost the replicas that run: retried like any other end.
            logger.error("supervisor.not_started stage=%d: %s", config.stage_id, error)
            slot.exit_reason = f"it could not be started: {error}"
            if error.errno in (errno.EMFILE, errno.ENFILE):
                # It says nothing about the replica: no end that counts, and no reason to give up.
                slot.start_at_s = now_s + _DESCRIPTOR_PAUSE_S
                slot.former_end = slot.exit_reason
                self._tell_wait(slot, _DESCRIPTOR_PAUSE_S, WaitKind.RESTART)
            else:
                self._handle_end(slot, EXIT_FAILED)
            return
        os.set_blocking(slot.child.output_fd, False)
        self._selector.register(slot.child.output_fd, selectors.EVENT_READ, slot)

    def _reap(self, slot: _Slot) -> None:
        child = slot.child
        code = None if child is None else child.poll()
        if child is None or code is None:
            return
        # All that it has left in its pipe, and not all that a process of its own still writes there.
        self._forward(slot, _MOST_READS)
        if rest := slot.output.take_rest():
            self._handle_line(slot, rest)
        slot.find_pid()
        self._unregister(child.output_fd)
        os.close(child.output_fd)
        self._tidy_at_s = 0.0
        slot.child = slot.replica_id = None
        self._export_at_s = 0.0
        self._handle_end(slot, code)

    def _handle_end(self, slot: _Slot, code: int) -> None:
        stage_id, who = self._config.replica.stage_id, slot.pair
        if self._kill_at_s is not None:
            text = f"supervisor.ended stage=%d {who} code=%d"
            logger.info(text, stage_id, code)
            return
        now_s = time.monotonic()
        served_for_s = 0.0 if slot.up_since_s is None else now_s - slot.up_since_s
        slot.former_end = slot.exit_reason or how_it_ended(code)
        # Exit code 0 counts, too: this supervisor has not stopped the replica.
        follows = slot.restarts.record_end(code, served_for_s)
        self._restart_count += isinstance(follows, StartAgain)
        match follows:
            case StartAgain(delay_s, ""):
                slot.start_at_s = now_s + delay_s
                text = f"supervisor.restarting stage=%d {who} code=%d in_s=%.1f: %s"
                logger.warning(text, stage_id, code, delay_s, slot.former_end)
                self._tell_wait(slot, delay_s, WaitKind.RESTART)
            case StartAgain(delay_s, why):
                slot.start_at_s = now_s + delay_s
                text = f"supervisor.not_kept_up stage=%d {who} code=%d next_try_s=%.0f: %s: %s"
                logger.error(text, stage_id, code, delay_s, why, slot.former_end)
                slot.former_end = f"{why}: {slot.former_end}"
                self._tell_wait(slot, delay_s, WaitKind.MISCONFIGURED if code == EXIT_CONFIG else WaitKind.CRASH_LOOP)
            case LeaveDown():
                slot.former_end = ""
                text = f"supervisor.drained stage=%d {who}: an operator has drained it; it stays down"
                logger.info(text, stage_id)

    def _tell_wait(self, slot: _Slot, delay_s: float, kind: WaitKind) -> None:
        if self._waits is not None:
            who = f"the supervisor of stage {self._config.replica.stage_id}"
            name = f"replica {slot.source.replica}" if slot.source.replica else "a replica"
            reason = f"{name} is started again after {delay_s:.1f} s; its last process: {slot.former_end}"
            self._waits.begin(str(slot.ordinal), who, reason, kind, self._config.replica.stage_id)

    def _stop(self, now_s: float) -> None:
        if self._kill_at_s is None:
            self._kill_at_s = now_s + self._config.replica.drain_timeout_s + self._config.kill_after_s
            self._on_stop()
            logger.info("supervisor.draining stage=%d", self._config.replica.stage_id)
        # A second signal is passed on, too: the replicas then fail their requests and end.
        for slot in self._slots:
            if slot.child is not None:
                slot.child.send_signal(signal.SIGTERM)

    def _kill_all(self) -> None:
        for slot in self._slots:
            if slot.child is not None:
                slot.child.send_signal(signal.SIGKILL)

    def _forward(self, slot: _Slot, reads: int = 1) -> None:
        for _ in range(reads):
            if slot.child is None:
                return
            try:
                content = os.read(slot.child.output_fd, _READ_BYTES)
            except BlockingIOError:
                return
            if not content:
                # It has closed its output and may run on: the selector would report it as readable for ever.
                self._unregister(slot.child.output_fd)
                return
            for line in slot.output.add(content):
                self._handle_line(slot, line)

    def _unregister(self, output_fd: int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(output_fd)

    def _handle_line(self, slot: _Slot, line: bytes) -> None:
        line, message = split_line(line)
        slot.find_pid()
        match message:
            case Up():
                slot.up_since_s = time.monotonic()
            case Exiting(reason):
                slot.exit_reason = reason
            case Registered(name):
                slot.source = replace(slot.source, replica=name)
            case Loading(phase):
                slot.phase = phase
            case Sampled(sample) if sample.stage_id == self._config.replica.stage_id:
                slot.replica_id = sample.replica_id
                if self._export is not None:
                    self._export(sample)
            case None:
                self._print(slot.source, line)
                return
            case Sampled():
                # Whatever prints in a replica can write such a line.
                pass
        if line:
            self._print(slot.source, line)

    def _print(self, source: LineSource, line: bytes) -> None:
        relay_line(source, line, is_json=self._config.replica.log.is_json)


class _SharedOutput:
    """Lines on a pipe that all processes of a launcher share."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._output = LineBuffer()
        os.set_blocking(fd, False)

    def read_lines(self) -> list[bytes]:
        """The lines that have come since the last call."""
        with contextlib.suppress(BlockingIOError):
            return self._output.add(os.read(self.fd, _READ_BYTES))
        return []


def how_it_ended(code: int) -> str:
    """Describe an exit code for people; it is negative for a signal."""
    if code >= 0:
        return f"it ended with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"it was ended by {name}" + (", as the kernel does where memory is short" if name == "SIGKILL" else "")


class _SignalPipe:
    """Signals as bytes on a socket, for a selector to wait for."""

    def __init__(self, numbers: tuple[signal.Signals, ...]) -> None:
        self._numbers = numbers
        self.receiver, self._sender = socket.socketpair()
        self.receiver.setblocking(False)
        self._sender.setblocking(False)

    def __enter__(self) -> _SignalPipe:
        self._former = {number: signal.signal(number, lambda *_: None) for number in self._numbers}
        self._former_fd = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *exc: object) -> None:
        signal.set_wakeup_fd(self._former_fd)
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self.receiver.close()
        self._sender.close()

    def drain(self) -> bytes:
        """The numbers of the signals received since the last call."""
        try:
            return self.receiver.recv(4096)
        except BlockingIOError:
            return b""
