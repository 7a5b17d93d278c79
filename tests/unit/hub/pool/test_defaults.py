"""What pools know of replicas and waiters at first."""

from __future__ import annotations

from math import inf

from hub.pool.status import FailureStreak
from tests.support.defaults import unusual_defaults


def test_at_first_nothing_has_failed_and_waiters_prefer_the_best() -> None:
    assert unusual_defaults("hub.pool") == {
        "Suspect.wanted": 2,
        "Try.is_trial": True,
        "Probation._starting_seen_s": -inf,
        "FailureStreak.last_at_s": -inf,
        "StageStatus.failures": FailureStreak(),
        "Waiter.prefers_best": True,
    }
