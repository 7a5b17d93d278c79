"""What the orchestrator takes for granted that nobody says."""

from __future__ import annotations

from tests.support.defaults import unusual_defaults


def test_a_hub_is_alone_and_a_replica_that_stays_silent_has_ended_if_nothing_else_is_said() -> None:
    found = unusual_defaults("hub.orchestrator")
    assert {name: default for name, default in found.items() if not callable(default)} == {
        "Bounds.live_hubs": 1,
        "Rejection.most_s": 600.0,
        "StillSilent.has_ended": True,
    }
    assert found["Active.trace_of"](0) == ""
