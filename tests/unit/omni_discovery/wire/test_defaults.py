"""What a message means that leaves a field out: releases that do not know the field send it so."""

from __future__ import annotations

from tests.support.defaults import unusual_defaults


def test_a_field_of_a_message_that_is_left_out_says_nothing_or_sets_no_bound() -> None:
    assert unusual_defaults("omni_discovery.wire") == {
        "Submit.remaining_s": 600.0,
        "Control.remaining_s": 60.0,
        # All attempts.
        "Abort.attempt": (1 << 53) - 1,
    }
