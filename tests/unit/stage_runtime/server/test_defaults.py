"""What a replica keeps of hubs and requests at first."""

from __future__ import annotations

from math import inf

from tests.support.defaults import unusual_defaults


def test_at_first_no_hub_has_asked_and_no_request_is_overdue_paused_or_parked() -> None:
    assert unusual_defaults("stage_runtime.server") == {
        "_Account.queued_from_s": -inf,
        "_Account.asking_since_s": -inf,
        "_Account.asked_at_s": -inf,
        "Ticket.overdue_at_s": inf,
        # No piece yet; their numbers begin at 0.
        "_Announced.last": -1,
        "_Heard.room": 8,
    }
