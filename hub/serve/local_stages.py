"""The local stages of a hub: one supervisor each, as child processes."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

import msgspec

from omni_discovery.backoff import RestartPauses
from omni_discovery.commands.registry import child_environment
from omni_discovery.commands.stage_options import StageOptions, open_config, stage_command
from omni_discovery.metrics.samples import HostSamples, LatestSamples, SupervisorSample, decode_sample
from omni_discovery.records.schema import ReplicaStatus
from omni_discovery.records.waits import WaitKind
from omni_discovery.stories import Waits
from omni_discovery.view.table import View

logger = logging.getLogger(__name__)

#: A supervisor kills replicas that have not drained in time; one that runs so long after the drain timeout hangs.
_KILL_S: Final = 25.0
#: Exit codes of a supervisor: an operator has drained all its replicas; its configuration is wrong.
_DRAINED: Final = 0
_BAD_CONFIG: Final = 2
_GAVE_UP: Final = 1
#: Interval between signals to a supervisor that has to hurry: two at once may reach it as one.
_HURRY_S: Final = 0.5
_NEVER_S: Final = float("inf")
#: A sample is shorter.
_MOST_SAMPLE_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class StageEnd:
    """A supervisor has ended by itself. ``was_up``: whether one of the stage's local replicas was up before."""

    stage_id: int
    code: int
    was_up: bool

    @property
    def is_refusal(self) -> bool:
        """Whether the stage can't run on this machine: its supervisor has printed why."""
        return self.code == _BAD_CONFIG and not self.was_up


@dataclass(slots=True)
class _Supervised:
    """One stage, over all its supervisors. ``child`` is None between two of them, and after the last."""

    options: StageOptions
    child: subprocess.Popen[bytes] | None = None
    #: On which ``child`` sends its samples.
    samples: socket.socket | None = None
    pauses: RestartPauses = field(default_factory=RestartPauses)
    start_at_s: float = _NEVER_S
    #: The registry's revision when ``child`` was started: its replicas have later epochs.
    start_revision: int = 0
    #: Since when one of its replicas is up, monotonic seconds; None before that.
    up_since_s: float | None = None
    was_up: bool = False

    def close_samples(self) -> None:
        """Close the socket of the samples, if there is one."""
        samples, self.samples = self.samples, None
        if samples is not None:
            samples.close()


@dataclass(slots=True)
class LocalStages:
    """Starts, restarts and stops the supervisors. Used from one thread: the kernel ends the children with it."""

    #: The hub's current view of the registry.
    view: Callable[[], View]
    now: Callable[[], float] = time.monotonic
    #: Receives which supervisors wait to be started again, for ``omni doctor``; None: not told.
    waits: Waits | None = None
    _running: list[_Supervised] = field(default_factory=list)
    _hurries: bool = False
    _latest: LatestSamples = field(default_factory=LatestSamples)

    def start(self, stages: tuple[StageOptions, ...]) -> None:
        """Start a supervisor for each stage."""
        self._running = [_Supervised(stage) for stage in stages]
        for supervised in self._running:
            self._start(supervised)

    def restart_ended(self) -> list[StageEnd]:
        """Restart supervisors after their backoff; return the ends since the last call. Call it twice a second.

        A stage that was drained or has a wrong configuration stays down; any other is restarted.
        """
        ends, view = [], self.view()
        self._receive_samples()
        for supervised in self._running:
            if supervised.child is None:
                if self.now() >= supervised.start_at_s:
                    self._start_again(supervised)
                continue
            if supervised.up_since_s is None and _is_up(supervised, view):
                supervised.up_since_s, supervised.was_up = self.now(), True
            code = supervised.child.poll()
            if code is not None:
                self._ended(supervised, code)
                ends.append(StageEnd(supervised.options.stage_id, code, supervised.was_up))
        return ends

    def starting(self) -> dict[int, int]:
        """How many replicas the supervisors start here, by stage; none for a stage whose supervisor does not run."""
        return {each.options.stage_id: each.options.count for each in self._running if each.child is not None}

    def samples(self) -> HostSamples:
        """The latest samples of the supervisors and their replicas, for metrics."""
        self._receive_samples()
        return self._latest.latest(time.monotonic())

    def stop(self) -> None:
        """Drain all stages at the same time; kill supervisors that take too long. Idempotent. ``hurry`` shortens it."""
        running, self._running = self._running, []
        children = {
            supervised.options.stage_id: supervised.child for supervised in running if supervised.child is not None
        }
        _terminate(children.values())
        if self.waits is not None:
            self.waits.close()
        stop_s = max((supervised.options.drain_timeout_s for supervised in running), default=0.0) + _KILL_S
        deadline_s = self.now() + stop_s
        for stage_id, child in children.items():
            while child.poll() is None and self.now() < deadline_s:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_HURRY_S)
                    break
                if self._hurries:
                    _terminate(children.values())
            if child.poll() is None:
                logger.warning("stage.killed stage=%d after_s=%.0f", stage_id, stop_s)
                child.kill()
                child.wait()
        for supervised in running:
            supervised.close_samples()

    def hurry(self) -> None:
        """Have ``stop``, now or later, fail the requests in flight instead of waiting for them. From any thread."""
        self._hurries = True

    def _start(self, supervised: _Supervised) -> None:
        supervised.start_revision, supervised.up_since_s, supervised.start_at_s = self.view().revision, None, _NEVER_S
        supervised.close_samples()
        # Packets, so that a sample comes whole or, where too many wait, not at all.
        supervised.samples, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        supervised.samples.setblocking(False)
        config_fd = open_config(msgspec.structs.replace(supervised.options, metrics_fd=theirs.fileno()))
        try:
            supervised.child = subprocess.Popen(
                [*stage_command(config_fd, supervised.options.stage_id), "--parent-pid", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=(config_fd, theirs.fileno()),
                env=child_environment(),
                # Ctrl-C in a terminal is for the hub, which stops its supervisors.
                start_new_session=True,
            )
        finally:
            os.close(config_fd)
            theirs.close()
        if self.waits is not None:
            self.waits.end(str(supervised.options.stage_id))
        self._forget_replicas(supervised.options, supervised.options.count)
        logger.info("stage.starting stage=%d replicas=%d", supervised.options.stage_id, supervised.options.count)

    def _start_again(self, supervised: _Supervised) -> None:
        try:
            self._start(supervised)
        except OSError as error:
            # A lack of processes or memory must not end the hub: retried like any other end.
            logger.error("stage.not_started stage=%d: %s", supervised.options.stage_id, error)
            supervised.start_at_s = self.now() + supervised.pauses.ended(0.0)

    def _ended(self, supervised: _Supervised, code: int) -> None:
        stage_id, now_s = supervised.options.stage_id, self.now()
        supervised.child = None
        is_over = code in (_DRAINED, _BAD_CONFIG)
        self._forget_replicas(supervised.options, 0 if is_over else supervised.options.count)
        if is_over:
            level = logging.ERROR if code else logging.INFO
            logger.log(level, "stage.ended stage=%d exit_code=%d: no local replica of it runs any more", stage_id, code)
            return
        pause_s = supervised.pauses.ended(0.0 if supervised.up_since_s is None else now_s - supervised.up_since_s)
        supervised.start_at_s = now_s + pause_s
        text = "stage.ended stage=%d exit_code=%d next_try_s=%.1f: its supervisor is started again then"
        logger.error(text, stage_id, code, pause_s)
        if self.waits is not None:
            reason = f"its supervisor ended with exit code {code} and is started again after {pause_s:.1f} s"
            # A supervisor ends with that code when its replicas end again and again.
            kind = WaitKind.CRASH_LOOP if code == _GAVE_UP else WaitKind.RESTART
            self.waits.begin(str(stage_id), f"the hub with its local stage {stage_id}", reason, kind, stage_id)

    def _receive_samples(self) -> None:
        for supervised in self._running:
            while supervised.samples is not None and (content := _packet(supervised.samples)):
                sample = decode_sample(content)
                if sample is not None:
                    self._latest.take_sample(sample, time.monotonic())

    def _forget_replicas(self, options: StageOptions, wanted: int) -> None:
        """No process of the stage runs; ``wanted`` of them should."""
        none = SupervisorSample(
            namespace=options.namespace, stage_id=options.stage_id, wanted=wanted, restarts=0, replica_ids=()
        )
        self._latest.take_sample(none, time.monotonic())


def _packet(samples: socket.socket) -> bytes:
    """The next packet; empty if none has come, or none will."""
    try:
        return samples.recv(_MOST_SAMPLE_BYTES)
    except OSError:
        return b""


def _is_up(supervised: _Supervised, view: View) -> bool:
    """Whether a replica of the stage is up that is younger than its supervisor."""
    return any(
        info.stage_id == supervised.options.stage_id
        and info.status is ReplicaStatus.UP
        and info.epoch > supervised.start_revision
        for info in view.replicas.values()
    )


def _terminate(children: Collection[subprocess.Popen[bytes]]) -> None:
    for child in children:
        child.send_signal(signal.SIGTERM)
