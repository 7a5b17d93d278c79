"""What events and states of requests mean that leave a field out."""

from __future__ import annotations

from math import inf

from hub.request.state import Phase
from tests.support.defaults import unusual_defaults


def test_what_is_not_said_of_a_request_is_the_usual_and_a_loss_the_worst() -> None:
    assert unusual_defaults("hub.request") == {
        "ReplicaLost.may_have_run": True,
        "ReplicaLost.has_ended": True,
        "OrchestratorRequestState.final_stage_id": -1,
        "StageRun.phase": Phase.WAITING,
        # None yet.
        "StageRun.attempt": -1,
        "StageRun.failed_attempt": -1,
        "StageRun.output_at_s": -inf,
        "StageRun.deterministic": True,
        "StageRun.refusal_status": 400,
    }
