"""The thread that publishes the state of a replica in its record: status, queue length, stall."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from omni_discovery.records.schema import ReplicaStatus
from stage_runtime.lifecycle import LifeState, published_status
from stage_runtime.status_pipe import Exiting, WriteStatus, no_status
from stage_runtime.supervisor.restarts import EXIT_DRAINED, EXIT_FAILED

logger = logging.getLogger(__name__)

_PUBLISH_INTERVAL_S: Final = 0.05


class RecordPublisher(Protocol):
    """The registration of a replica, as far as the replica uses it."""

    def update_info(self, status: ReplicaStatus | None = None, queue_length: int | None = None) -> None:
        """Publish the status, the queue length (in requests), or both."""

    def describe(self, **fields: Any) -> None:
        """Publish other fields of the record, by name."""

    def close(self) -> None:
        """Withdraw the record."""

    @property
    def lease_left_s(self) -> float:
        """How long the lease of the record lasts if it is not renewed; 0 without one."""

    @property
    def awaited_hubs(self) -> frozenset[str] | None:
        """The live hubs that have not acknowledged the drain; None while etcd does not tell which hubs live."""


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """The state of a replica at one moment. ``is_hopeless``: stalled for so long that the process has to end.

    ``requests`` names what was in the engine when it stalled; empty while it is not stalled. ``is_drained``: an
    operator has drained it, so it stays down.
    """

    state: LifeState
    queue_length: int
    is_stalled: bool
    is_hopeless: bool
    requests: str = ""
    is_drained: bool = False


class StatusPublisher:
    """Publishes changes of ``take_snapshot()``, 20 times a second, from ``start`` to ``stop``.

    An error is logged, counted and retried: only ``stop`` ends the thread.
    """

    def __init__(
        self,
        client: RecordPublisher,
        take_snapshot: Callable[[], ReplicaSnapshot],
        stage_id: int,
        stall_reason: str,
        end_process: Callable[[int], object] = os._exit,
        write_status: WriteStatus = no_status,
    ) -> None:
        self._client = client
        self._take_snapshot = take_snapshot
        self._stage_id = stage_id
        self._stall_reason = stall_reason
        self._end_process = end_process
        self._write_status = write_status
        self._published: tuple[ReplicaStatus, int] = (ReplicaStatus.STARTING, 0)
        self._was_stalled = self._was_asleep = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replica-status", daemon=True)
        #: Failed attempts to publish. Written by the thread only.
        self.failures = 0

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread; return after ``timeout_s`` also if it has not ended. Idempotent."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        failed_before = 0
        while not self._stopped.wait(_PUBLISH_INTERVAL_S):
            try:
                self._publish(self._take_snapshot())
            except Exception:
                self.failures += 1
                if not failed_before:
                    logger.exception("replica.not_published stage=%d: it is tried again", self._stage_id)
                failed_before += 1
                continue
            if failed_before:
                logger.info("replica.published_again stage=%d failures=%d", self._stage_id, failed_before)
                failed_before = 0

    def _publish(self, snapshot: ReplicaSnapshot) -> None:
        if snapshot.is_stalled is not self._was_stalled:
            text = "replica.stall stage=%d stalled=%s requests=%s"
            logger.warning(text, self._stage_id, snapshot.is_stalled, snapshot.requests or "none")
            self._client.describe(reason=self._stall_reason if snapshot.is_stalled else "")
            self._was_stalled = snapshot.is_stalled
        is_asleep = snapshot.state is LifeState.ASLEEP
        if is_asleep is not self._was_asleep:
            logger.info("replica.sleep asleep=%s", is_asleep)
            self._client.describe(phase="asleep" if is_asleep else "ready")
            self._was_asleep = is_asleep
        if snapshot.is_hopeless:
            # One that drains is being stopped, most times by its supervisor.
            then = "it was draining" if snapshot.state is LifeState.DRAINING else "to be started anew"
            text = "replica.hopeless stage=%d requests=%s: %s; ending, %s"
            logger.error(text, self._stage_id, snapshot.requests or "none", self._stall_reason, then)
            self._write_status(Exiting(self._stall_reason))
            # The main thread, which would close everything in order, is the one that hangs.
            self._end_process(EXIT_DRAINED if snapshot.is_drained else EXIT_FAILED)
        current = published_status(snapshot.state, snapshot.is_stalled), snapshot.queue_length
        # The final status, down or error with its reason, is published by the main thread.
        if current != self._published and snapshot.state not in (LifeState.STOPPED, LifeState.FAILED):
            self._client.update_info(status=current[0], queue_length=current[1])
            self._published = current
