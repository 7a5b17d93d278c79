"""The stages that run beside a hub: one supervisor each, as child processes, never by import."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

from omni_discovery.backoff import RestartPauses
from omni_discovery.commands.main import child_environment
from omni_discovery.commands.stage_options import StageOptions, open_config, stage_command
from omni_discovery.records.schema import ReplicaStatus
from omni_discovery.view.table import View

logger = logging.getLogger(__name__)

#: A supervisor kills what has not drained in time, this much later at most; after it, it hangs itself.
_KILL_S: Final = 25.0
#: Exit codes of a supervisor: an operator has drained all its replicas; it was given what it can't run with.
_DRAINED: Final = 0
_BAD_INPUT: Final = 2
#: How often a supervisor that is to hurry is told so: signals that come at once may reach it as one.
_HURRY_S: Final = 0.5
_NEVER_S: Final = float("inf")


@dataclass(frozen=True, slots=True)
class StageEnd:
    """A supervisor has ended that nobody had told to. ``was_up``: whether this stage could once be served from here."""

    stage_id: int
    code: int
    was_up: bool

    @property
    def is_refusal(self) -> bool:
        """Whether this machine never could run it: the supervisor has said what is wrong."""
        return self.code == _BAD_INPUT and not self.was_up


@dataclass(slots=True)
class _Running:
    """One stage over all its supervisors. ``child`` is None between two of them, and behind the last."""

    stage: StageOptions
    child: subprocess.Popen[bytes] | None = None
    pauses: RestartPauses = field(default_factory=RestartPauses)
    start_at_s: float = _NEVER_S
    #: Where the registry stood when ``child`` was started: replicas of it come into being later.
    begun_at: int = 0
    #: Since when one of its replicas is up; None before that.
    up_since_s: float | None = None
    was_up: bool = False


@dataclass(slots=True)
class LocalStages:
    """Starts and stops the supervisors. Used from one thread, the one that lives longest: children die with it."""

    #: The hub's current view of the registry.
    view: Callable[[], View]
    now: Callable[[], float] = time.monotonic
    _running: list[_Running] = field(default_factory=list)
    _hurries: bool = False

    def start(self, stages: tuple[StageOptions, ...]) -> None:
        """Start a supervisor for each stage."""
        self._running = [_Running(stage) for stage in stages]
        for each in self._running:
            self._start(each)

    def tend(self) -> list[StageEnd]:
        """Start again whose time has come; return the ends since the last call. Due about twice a second.

        One that was drained, or given what it can't run with, stays down; any other is started again.
        """
        ends, view = [], self.view()
        for each in self._running:
            if each.child is None:
                if self.now() >= each.start_at_s:
                    self._start_again(each)
                continue
            if each.up_since_s is None and _is_up(each, view):
                each.up_since_s, each.was_up = self.now(), True
            code = each.child.poll()
            if code is not None:
                self._ended(each, code)
                ends.append(StageEnd(each.stage.stage_id, code, each.was_up))
        return ends

    def stop(self) -> None:
        """Let all drain at once, then make sure that they are gone. Idempotent. ``hurry`` shortens it."""
        running, self._running = self._running, []
        children = {each.stage.stage_id: each.child for each in running if each.child is not None}
        _terminate(children.values())
        stop_s = max((each.stage.drain_timeout_s for each in running), default=0.0) + _KILL_S
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

    def hurry(self) -> None:
        """Have ``stop``, now or later, wait for nothing that still runs. From any thread."""
        self._hurries = True

    def _start(self, each: _Running) -> None:
        each.begun_at, each.up_since_s, each.start_at_s = self.view().revision, None, _NEVER_S
        config_fd = open_config(each.stage)
        try:
            each.child = subprocess.Popen(
                [*stage_command(config_fd, each.stage.stage_id), "--parent-pid", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=(config_fd,),
                env=child_environment(),
                # Ctrl-C in a terminal is for the hub, which stops its supervisors.
                start_new_session=True,
            )
        finally:
            os.close(config_fd)
        logger.info("stage.starting stage=%d replicas=%d", each.stage.stage_id, each.stage.count)

    def _start_again(self, each: _Running) -> None:
        try:
            self._start(each)
        except OSError as error:
            # That the machine has no process or memory to give just now must not cost the hub.
            logger.error("stage.not_started stage=%d: %s", each.stage.stage_id, error)
            each.start_at_s = self.now() + each.pauses.ended(0.0)

    def _ended(self, each: _Running, code: int) -> None:
        stage_id, now_s = each.stage.stage_id, self.now()
        each.child = None
        if code in (_DRAINED, _BAD_INPUT):
            level = logging.ERROR if code else logging.INFO
            logger.log(level, "stage.ended stage=%d exit_code=%d: no local replica of it runs any more", stage_id, code)
            return
        pause_s = each.pauses.ended(0.0 if each.up_since_s is None else now_s - each.up_since_s)
        each.start_at_s = now_s + pause_s
        text = "stage.ended stage=%d exit_code=%d next_try_s=%.1f: its supervisor is started again then"
        logger.error(text, stage_id, code, pause_s)


def _is_up(each: _Running, view: View) -> bool:
    """Whether a replica of the stage is up that came after its supervisor."""
    return any(
        info.stage_id == each.stage.stage_id and info.status is ReplicaStatus.UP and info.epoch > each.begun_at
        for info in view.replicas.values()
    )


def _terminate(children: Collection[subprocess.Popen[bytes]]) -> None:
    for child in children:
        child.send_signal(signal.SIGTERM)
