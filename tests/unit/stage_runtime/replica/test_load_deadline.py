"""The limit of how long an engine may take to load."""

from __future__ import annotations

import queue

import pytest

from stage_runtime.replica.load_deadline import load_deadline


def test_a_load_that_takes_too_long_is_given_up_with_the_reason() -> None:
    reasons: queue.Queue[str] = queue.Queue()
    with load_deadline(0.05, reasons.put):
        assert reasons.get(timeout=30) == "its engine had not loaded within 0.05 s (--stage-init-timeout)"


@pytest.mark.parametrize("limit_s", [None, 0.05])
def test_a_load_that_is_done_is_not_given_up(limit_s: float | None) -> None:
    reasons: queue.Queue[str] = queue.Queue()
    with load_deadline(limit_s, reasons.put):
        pass
    with pytest.raises(queue.Empty):
        reasons.get(timeout=0.3)
