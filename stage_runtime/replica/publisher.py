"""The thread that publishes what a replica's other threads do: its status, its queue, and that it stands still."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from omni_discovery.records.schema import ReplicaStatus
from stage_runtime.lifecycle import Stage, published_status
from stage_runtime.status_pipe import LastWords, Tell, tell_nobody
from stage_runtime.supervisor.restarts import EXIT_FAILED

logger = logging.getLogger(__name__)

_PUBLISH_INTERVAL_S: Final = 0.05


class StageClient(Protocol):
    """What a replica needs of its registration."""

    def update_info(self, status: ReplicaStatus | None = None, queue_length: int | None = None) -> None:
        """Publish a change."""

    def describe(self, **fields: Any) -> None:
        """Publish other fields of the record."""

    def close(self) -> None:
        """Withdraw."""

    @property
    def awaited_hubs(self) -> frozenset[str] | None:
        """The hubs that have not said yet that they know of a drain; None while that is not known."""


@dataclass(frozen=True, slots=True)
class Look:
    """What is to be seen of a replica at one moment. ``is_hopeless``: it stands still beyond recovery."""

    stage: Stage
    queue_length: int
    is_stalled: bool
    is_hopeless: bool


class StatusPublisher:
    """Looks at the replica again and again, and publishes what has changed, from ``start`` to ``stop``.

    Whatever goes wrong on the way is logged, counted and tried again: the thread ends by ``stop`` only.
    """

    def __init__(
        self,
        client: StageClient,
        look: Callable[[], Look],
        stage_id: int,
        stall_reason: str,
        end_process: Callable[[int], object] = os._exit,
        tell: Tell = tell_nobody,
    ) -> None:
        self._client = client
        self._look = look
        self._stage_id = stage_id
        self._stall_reason = stall_reason
        self._end_process = end_process
        self._tell = tell
        self._published: tuple[ReplicaStatus, int] = (ReplicaStatus.STARTING, 0)
        self._was_stalled = self._was_asleep = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replica-status", daemon=True)
        #: How often an attempt to look or to publish has failed. Written by the thread only.
        self.failures = 0

    def start(self) -> None:
        """Begin to publish."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread, if it ends within ``timeout_s``. Idempotent."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        failed_before = 0
        while not self._stopped.wait(_PUBLISH_INTERVAL_S):
            try:
                self._publish(self._look())
            except Exception:
                self.failures += 1
                if not failed_before:
                    logger.exception("replica.not_published stage=%d: it is tried again", self._stage_id)
                failed_before += 1
                continue
            if failed_before:
                logger.info("replica.published_again stage=%d failures=%d", self._stage_id, failed_before)
                failed_before = 0

    def _publish(self, look: Look) -> None:
        if look.is_stalled is not self._was_stalled:
            logger.warning("replica.stall stalled=%s", look.is_stalled)
            self._client.describe(reason=self._stall_reason if look.is_stalled else "")
            self._was_stalled = look.is_stalled
        is_asleep = look.stage is Stage.ASLEEP
        if is_asleep is not self._was_asleep:
            logger.info("replica.sleep asleep=%s", is_asleep)
            self._client.describe(phase="asleep" if is_asleep else "ready")
            self._was_asleep = is_asleep
        if look.is_hopeless:
            logger.error("replica.hopeless stage=%d: ending, to be started anew", self._stage_id)
            self._tell(LastWords(self._stall_reason))
            # The main thread, which would take everything down in order, is the one that hangs.
            self._end_process(EXIT_FAILED)
        current = published_status(look.stage, look.is_stalled), look.queue_length
        # The last words, down or error with their reason, are the main thread's.
        if current != self._published and look.stage not in (Stage.STOPPED, Stage.FAILED):
            self._client.update_info(status=current[0], queue_length=current[1])
            self._published = current
