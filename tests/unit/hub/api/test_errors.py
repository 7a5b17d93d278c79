"""How errors look over HTTP: the status, and what the client or the operator can do next."""

from __future__ import annotations

import pytest

from hub.api.errors import describe, error_response
from hub.orchestrator.admission import Bounds, StageLoad, find_rejection
from omni_discovery.errors import (
    DeadlineExceededError,
    EngineFailedError,
    HubUnavailableError,
    InvalidRequestError,
    OmniError,
    OverloadedError,
    PoisonousRequestError,
    ReplicaLostError,
    StageUnavailableError,
)

_NEXT = "try again in 1 s; omni replicas shows who serves stage 2, omni doctor what is wrong"


@pytest.mark.parametrize(
    ("error", "status", "next_step"),
    [
        (InvalidRequestError("'x' is wrong"), 400, "'x' is wrong"),
        (OverloadedError("full", 6.2), 429, "full: try again in 7 s"),
        (StageUnavailableError(2, "nobody"), 503, f"nobody: {_NEXT}"),
        (HubUnavailableError(0, "it stops"), 503, "it stops: try again in 1 s; or ask another hub"),
        (ReplicaLostError("gone"), 503, "gone: try again in 1 s"),
        (DeadlineExceededError("late"), 504, "late: give the request a longer 'timeout', or send it again later"),
        (EngineFailedError("it broke"), 500, "it broke: the log of that replica says more"),
        (
            PoisonousRequestError("gone"),
            500,
            "gone: don't send it again as it is; the logs of these replicas say more",
        ),
    ],
)
def test_a_message_ends_with_what_to_do_next(error: OmniError, status: int, next_step: str) -> None:
    found, body = describe(error)
    assert (found, body["error"]["message"]) == (status, next_step)


def test_clients_are_told_not_to_repeat_what_ends_replicas_by_themselves() -> None:
    assert error_response(PoisonousRequestError("gone")).headers["x-should-retry"] == "false"
    assert "x-should-retry" not in error_response(EngineFailedError("it broke")).headers


def test_a_client_that_is_refused_for_load_reads_the_same_time_in_the_text_and_in_the_header() -> None:
    found = find_rejection([StageLoad(0, backlog=50, slots=2, mean_service_s=1.5)], Bounds(10, 100), 50, 600.0)
    assert found is not None
    error = OverloadedError(found.reason, found.retry_after_s)
    seconds = int(error_response(error).headers["Retry-After"])
    assert seconds >= 1
    assert describe(error)[1]["error"]["message"].endswith(f"try again in {seconds} s")
