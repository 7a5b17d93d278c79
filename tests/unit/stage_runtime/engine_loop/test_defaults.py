"""What jobs and outcomes of the engine's thread mean that leave a field out."""

from __future__ import annotations

from tests.support.defaults import unusual_defaults


def test_what_a_job_or_an_outcome_does_not_say_is_the_usual() -> None:
    assert unusual_defaults("stage_runtime.engine_loop") == {
        "RequestFailed.status": 400,
        "Edge.window": 16,
        # None was fed.
        "_Inflow.last_fed": -1,
        "SegmentedRequest.finish_reason": "stop",
    }
