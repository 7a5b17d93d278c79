"""What is taken for granted of replicas that nobody says."""

from __future__ import annotations

from math import inf

from tests.support.defaults import unusual_defaults


def test_a_replica_grants_no_credits_and_has_given_up_nobody_if_nothing_else_is_said() -> None:
    """Of names, too, nothing is known at first: each is due at once."""
    assert unusual_defaults("hub.replicas") == {"_Name.fresh_until_s": -inf, "_Name.retry_at_s": -inf}
