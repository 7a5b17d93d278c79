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

#: A supervisor kills what has not drained in time, this much later at most; after it, it hangs itself.
_KILL_S: Final = 25.0


@dataclass(frozen=True, slots=True)
class LocalStage:
    """One stage to run here, ``count`` replicas of it."""

    stage_id: int
    count: int
    #: What is different about it on this host, as ``--stage-overrides`` has it.
    overrides: str = ""


@dataclass(slots=True)
class LocalStages:
    """Starts and stops the supervisors. Used from one thread, the one that lives longest: children die with it."""

    endpoints: str
    namespace: str
    ttl_s: float
    replica_address: str | None = None
    #: Further flags for the supervisors: how to log in to etcd, how to talk to hubs, how long to drain.
    security_flags: tuple[str, ...] = ()
    #: What those flags say of how long a drain may take.
    drain_timeout_s: float = 60.0
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
        stop_s = self.drain_timeout_s + _KILL_S
        deadline_s = time.monotonic() + stop_s
        for stage_id, child in self._running.items():
            try:
                child.wait(max(0.1, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("stage.killed stage=%d after_s=%.0f", stage_id, stop_s)
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
        if stage.overrides:
            command += ["--stage-overrides", stage.overrides]
        return command + (["--omni-replica-address", self.replica_address] if self.replica_address else [])
