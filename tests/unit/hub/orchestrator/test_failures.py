"""Whom the log line of a failed request names: the stage at fault, the attempt and the replica."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from hub.orchestrator import failures
from hub.orchestrator.failures import RequestFailures, failing_stage, failure_of
from hub.request.events import ReplicaRef
from hub.request.recent import RecentRequests
from hub.request.state import Phase, StageRun
from omni_discovery.errors import (
    DeadlineExceededError,
    EngineFailedError,
    HubUnavailableError,
    InvalidRequestError,
    OverloadedError,
    ReplicaLostError,
    RequestError,
    StageUnavailableError,
)
from omni_discovery.failure_log import FailureLog


def run_of(stage_id: int, *phases: Phase, attempt: int = -1, failure: RequestError | None = None) -> StageRun:
    run = StageRun(stage_id, attempt=attempt, failure=failure)
    for phase in phases:
        run.to(phase)
    if attempt >= 0:
        run.replica = ReplicaRef(stage_id, 3, 70, "tcp://127.0.0.1:1")
    return run


def active_of(*runs: StageRun, parent_id: str = "") -> Any:
    request = SimpleNamespace(request_id="r~1", parent_id=parent_id, label="", key="")
    machine = SimpleNamespace(runs={run.stage_id: run for run in runs})
    return SimpleNamespace(request=request, machine=machine, trace_id="")


DONE = (Phase.DISPATCHED, Phase.ACCEPTED, Phase.DONE)


def named(active: Any, error: RequestError) -> tuple[str, str, int | None]:
    failure = failure_of(active, error)
    return failure.stage, failure.replica, failure.attempt


def test_the_stage_that_failed_is_named_with_the_attempt_that_did() -> None:
    """Attempt 1 fails, and attempt 2 finds no replica."""
    error = EngineFailedError("it broke")
    failed = run_of(1, *DONE[:1], attempt=2, failure=error)
    failed.failed_attempt, failed.failed_replica, failed.replica = 1, failed.replica, None
    assert named(active_of(run_of(0, *DONE, attempt=0), failed), error) == ("1", "1/3", 1)


def test_at_the_deadline_the_stage_that_runs_is_named() -> None:
    active = active_of(run_of(0, *DONE, attempt=0), run_of(1), run_of(2, *DONE[:2], attempt=1))
    assert named(active, DeadlineExceededError("too late")) == ("2", "2/3", 1)


def test_an_empty_stage_is_named_and_a_stopping_hub_names_what_ran() -> None:
    active = active_of(run_of(0, *DONE, attempt=0), run_of(1, *DONE[:1], attempt=0))
    active.machine.runs[1].replica = None
    assert named(active, StageUnavailableError(1, "no replica")) == ("1", "", 0)
    assert named(active, HubUnavailableError(0, "the hub is stopping")) == ("1", "", 0)


def test_a_request_that_was_never_dispatched_and_one_whose_stages_are_done() -> None:
    assert named(active_of(run_of(0)), DeadlineExceededError("")) == ("0", "", None)
    assert named(active_of(run_of(0, *DONE, attempt=0)), DeadlineExceededError("")) == ("", "", None)


def test_a_companion_names_its_parent() -> None:
    assert failure_of(active_of(run_of(0), parent_id="p~1"), DeadlineExceededError("")).parent == "p~1"


async def test_failures_are_counted_by_stage_for_the_hubs_report_and_mistakes_of_clients_are_not() -> None:
    recent = RecentRequests()
    log = RequestFailures(lambda *_: None, recent)
    for error in (EngineFailedError("it broke"), InvalidRequestError("no"), DeadlineExceededError("late")):
        log.count_end()
        log.log_failure(active_of(run_of(0, *DONE, attempt=0), run_of(1, *DONE[:2], attempt=0)), error)
    log.log_failure(active_of(run_of(0), parent_id="p~1"), EngineFailedError("a companion's is its parent's"))
    now_s = time.monotonic()
    (stage,) = recent.failures(now_s, 0.0)
    assert (stage.stage_id, stage.kinds) == (1, {"EngineFailedError": 1, "DeadlineExceededError": 1})
    assert recent.requests(now_s) == 3
    log.close()


async def test_a_storm_is_summed_up_by_a_timer_and_at_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. 30 fail at once: 2 lines; 2. a moment later, with no further failure, their sum; 3. the rest at the close"""

    def short(*arguments: Any) -> FailureLog:
        return FailureLog(*arguments, most_lines=2, window_s=0.1)

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(failures, "FailureLog", short)
    counted: Counter[tuple[str, str, str]] = Counter()
    log = RequestFailures(lambda *labels: counted.update([labels]))
    for _ in range(30):
        log.log_failure(active_of(run_of(0)), EngineFailedError("it broke"))
    assert len(caplog.messages) == 2
    await asyncio.sleep(0.3)
    assert caplog.messages[2].startswith("requests.failed count=28 kinds={EngineFailedError:28} stages={0:28} in_s=0.1")
    for _ in range(3):
        log.log_failure(active_of(run_of(0)), EngineFailedError("it broke"))
    log.close()
    log.close()
    assert caplog.messages[5:] == ["requests.failed count=1 kinds={EngineFailedError:1} stages={0:1} in_s=0.0"]
    log.log_failure(active_of(run_of(0)), InvalidRequestError("n is 2"))
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 6 + [logging.INFO]
    assert counted == {("0", "", "EngineFailedError"): 33, ("0", "", "InvalidRequestError"): 1}


async def test_a_companion_is_logged_and_not_counted() -> None:
    """Its parent is one request that failed, not two."""
    counted: list[tuple[str, ...]] = []
    log = RequestFailures(lambda *labels: counted.append(labels))
    log.log_failure(active_of(run_of(0), parent_id="p~1"), EngineFailedError("it broke"))
    assert not counted
    log.log_failure(active_of(run_of(0)), EngineFailedError("it broke"))
    assert counted == [("0", "", "EngineFailedError")]
    log.close()


async def test_a_line_that_can_not_be_made_does_not_stop_the_requests_end(caplog: pytest.LogCaptureFixture) -> None:
    broken: Any = SimpleNamespace(request=SimpleNamespace(request_id="r~1"))
    RequestFailures(lambda *_: None).log_failure(broken, EngineFailedError("it broke"))
    assert caplog.messages == ["request.failure_not_logged request=r~1"]


def failing(
    error: RequestError,
    *,
    timeout_s: float = 10.0,
    segmented: bool = False,
    behind: bool = False,
    output_at_s: float | None = None,
) -> int | None:
    """The stage that counts as failing, of a request whose stage 1 had that failure and whose usual time is 10 s.

    It fails at second 100; ``output_at_s``: when stage 1 put out something.
    """
    active = active_of(run_of(0, *DONE, attempt=0), run_of(1, *DONE[:2], attempt=0, failure=error))
    active.request.timeout_s, active.request.segmented = timeout_s, segmented
    active.machine.is_client_behind = behind
    if output_at_s is not None:
        active.machine.runs[1].output_at_s = output_at_s
    run = failing_stage(active, error, 10.0, 100.0)
    return None if run is None else run.stage_id


@pytest.mark.parametrize("kind", [EngineFailedError, ReplicaLostError, DeadlineExceededError])
def test_a_stage_that_did_not_do_its_work_counts_as_failing(kind: type[RequestError]) -> None:
    assert failing(kind("x")) == 1


@pytest.mark.parametrize(
    "error",
    [InvalidRequestError("x"), OverloadedError("x"), StageUnavailableError(1, "x"), HubUnavailableError(1, "x")],
)
def test_a_wrong_request_and_a_stage_without_replicas_are_no_failing_stage(error: RequestError) -> None:
    assert failing(error) is None


def test_a_deadline_that_is_the_clients_own_doing_does_not_count() -> None:
    """A short timeout, a client that does not read, one that has more input to send: any client could do that."""
    late = DeadlineExceededError("x")
    assert failing(late, timeout_s=9.9) is None
    assert failing(late, behind=True) is None
    assert failing(late, segmented=True) is None


@pytest.mark.attack("I4")
def test_a_deadline_does_not_count_while_output_is_still_coming() -> None:
    """Of 10 s, a pause of a quarter is no end of the output, of 100 s one of 10 s; an engine that fails is at fault."""
    late = DeadlineExceededError("x")
    assert failing(late, output_at_s=97.5) is None
    assert failing(late, output_at_s=97.4) == 1
    assert failing(late, timeout_s=100.0, output_at_s=90.0) is None
    assert failing(late, timeout_s=100.0, output_at_s=89.9) == 1
    assert failing(EngineFailedError("x"), output_at_s=99.9) == 1
