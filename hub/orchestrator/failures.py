"""RequestFailures: a log line and a count for each request of the hub that ends with an error."""

from __future__ import annotations

import asyncio
import logging
import time
from math import inf
from typing import TYPE_CHECKING, Final

from hub.request.recent import RecentRequests
from omni_discovery.errors import (
    DeadlineExceededError,
    EngineFailedError,
    HubUnavailableError,
    InvalidRequestError,
    ReplicaLostError,
    RequestError,
    StageUnavailableError,
)
from omni_discovery.failure_log import Failure, FailureLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from hub.orchestrator.active import Active
    from hub.request.machine import RequestMachine
    from hub.request.state import StageRun

logger = logging.getLogger(__name__)

#: How late the sum of a storm may be: a timer that fires a moment early must not fire again at once.
_SLACK_S: Final = 0.01
#: The longest pause within an output, and at most a quarter of the request's time: behind a longer one, no more comes.
_LONGEST_PAUSE_S: Final = 10.0


class RequestFailures:
    """Lives on the hub's loop. Many failures at once are summed up, see FailureLog; ``recent`` counts them.

    ``usual_timeout_s`` is the timeout of requests that name none.
    """

    def __init__(
        self,
        count: Callable[[str, str, str], None],
        recent: RecentRequests | None = None,
        usual_timeout_s: float = inf,
    ) -> None:
        """``count(stage, replica, type of the error)`` is called for each failed request but companions."""
        self._count = count
        self._recent = recent or RecentRequests()
        self._usual_timeout_s = usual_timeout_s
        self._log = FailureLog(logger.log, time.monotonic)
        self._timer: asyncio.TimerHandle | None = None

    def count_end(self) -> None:
        """A request has ended that its client did not cancel, whatever its outcome."""
        self._recent.count_end(time.monotonic())

    def log_failure(self, active: Active, error: RequestError) -> None:
        """Log that a request has ended with this error; a client's own mistake at INFO. Never raises.

        Its stage is told, if that has not done its work.
        """
        try:
            # The operator can't change a client's mistake.
            level = logging.INFO if isinstance(error, InvalidRequestError) else logging.WARNING
            failure = failure_of(active, error)
            if not failure.parent:
                self._count(failure.stage, failure.replica, failure.kind)
            # A companion's failure is its parent's, which is counted.
            if not (failure.parent or isinstance(error, InvalidRequestError)):
                stage_id = int(failure.stage) if failure.stage else None
                self._recent.count_failure(stage_id, failure.kind, time.monotonic())
            self._log.add(failure, level)
            self._write_due()
            run = failing_stage(active, error, self._usual_timeout_s, time.perf_counter())
            if run is not None:
                pool = active.pools[run.stage_id]
                pool.core.stage_failed(type(error).__name__, pool.now())
        except Exception:
            # The client has its answer, and the request's end must not be undone by its diagnosis.
            logger.exception("request.failure_not_logged request=%s", active.request.request_id)

    def close(self) -> None:
        """Log the sums that are not logged yet. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._log.close()

    def _write_due(self) -> None:
        due_s = self._log.write_due()
        if due_s is not None and self._timer is None:
            delay_s = max(0.0, due_s - time.monotonic()) + _SLACK_S
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._write_due()


def failure_of(active: Active, error: RequestError) -> Failure:
    """The values of the log line: the stage at fault, and its attempt that failed or was the last, with the replica."""
    run = stage_at_fault(active.machine, error)
    attempt, replica = (-1, None) if run is None else (run.attempt, run.replica)
    if run is not None and run.failure is error:
        # A later attempt may have found no replica.
        attempt, replica = run.failed_attempt, run.failed_replica
    return Failure(
        request_id=active.request.request_id,
        stage="" if run is None else str(run.stage_id),
        replica="" if replica is None else str(replica),
        attempt=None if attempt < 0 else attempt,
        kind=type(error).__name__,
        cause=str(error),
        parent=active.request.parent_id,
        label=active.request.label,
        key=active.request.key,
        epoch=0 if replica is None else replica.epoch,
        trace=active.trace_id,
    )


def stage_at_fault(machine: RequestMachine, error: RequestError) -> StageRun | None:
    """The stage that failed with this error, or that ran when the error ended the request; None if all were done."""
    runs = machine.runs.values()
    for run in runs:
        if run.failure is error:
            return run
    # A hub that stops names its first stage, whatever the request was at.
    if isinstance(error, StageUnavailableError) and not isinstance(error, HubUnavailableError):
        return machine.runs.get(error.stage_id)
    unsettled = [run for run in runs if not run.settled]
    return next((run for run in unsettled if run.running), unsettled[0] if unsettled else None)


def failing_stage(active: Active, error: RequestError, usual_timeout_s: float, now_s: float) -> StageRun | None:
    """The stage that did not do its work for this request, so that it counts as failing if that goes on; else None.

    A deadline counts only where the client left the hub's usual time, took what was made, and had sent its whole input;
    and only where nothing more came of the stage: an answer that is longer than its time is no fault of it. ``now_s``
    is on ``time.perf_counter``.
    """
    if isinstance(error, EngineFailedError | ReplicaLostError):
        return next((run for run in active.machine.runs.values() if run.failure is error), None)
    if not isinstance(error, DeadlineExceededError):
        return None
    is_usual = active.request.timeout_s >= usual_timeout_s and not active.request.segmented
    run = stage_at_fault(active.machine, error) if is_usual and not active.machine.is_client_behind else None
    pause_s = min(_LONGEST_PAUSE_S, active.request.timeout_s / 4)
    return None if run is None or now_s - run.output_at_s <= pause_s else run
