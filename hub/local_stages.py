"""The stages that run beside a hub: one supervisor each, as child processes, never by import."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Final

logger = logging.getLogger(__name__)

#: A supervisor drains its replicas for up to a minute and then kills them itself; this is for one that hangs.
_STOP_S: Final = 75.0


@dataclass(frozen=True, slots=True)
class LocalStage:
    """One stage to run here, ``count`` replicas of it."""

    stage_id: int
    count: int


@dataclass(slots=True)
class LocalStages:
    """Starts and stops the supervisors. Used from one thread, the one that lives longest: children die with it."""

    endpoints: str
    namespace: str
    ttl_s: float
    replica_address: str | None = None
    #: Further flags for the supervisors: how to log in to etcd.
    security_flags: tuple[str, ...] = ()
    _running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, stages: tuple[LocalStage, ...]) -> None:
        """Start a supervisor for each stage, in a session of its own: Ctrl-C reaches only the hub."""
        for stage in stages:
            self._running[stage.stage_id] = subprocess.Popen(
                self._command(stage), stdin=subprocess.DEVNULL, start_new_session=True
            )
            logger.info("stage.starting stage=%d replicas=%d", stage.stage_id, stage.count)

    def ended(self) -> dict[int, int]:
        """Supervisors that have ended since the last call, with their exit codes, by stage."""
        codes = {stage_id: code for stage_id, child in self._running.items() if (code := child.poll()) is not None}
        for stage_id in codes:
            del self._running[stage_id]
        return codes

    def stop(self) -> None:
        """Let all drain at once, then make sure that they are gone. Idempotent."""
        for child in self._running.values():
            child.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + _STOP_S
        for stage_id, child in self._running.items():
            try:
                child.wait(max(0.1, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("stage.killed stage=%d after_s=%.0f", stage_id, _STOP_S)
                child.kill()
                child.wait()
        self._running.clear()

    def _command(self, stage: LocalStage) -> list[str]:
        command = [
            *(sys.executable, "-m", "stage_runtime"),
            *("--stage-id", str(stage.stage_id)),
            *("--omni-dp-size-local", str(stage.count)),
            *("--etcd-endpoints", self.endpoints),
            *("--namespace", self.namespace),
            *("--omni-heartbeat-timeout", str(self.ttl_s)),
            *("--parent-pid", str(os.getpid())),
            *self.security_flags,
        ]
        return command + (["--omni-replica-address", self.replica_address] if self.replica_address else [])
