"""What replicas say of their work is counted only as far as it can be true."""

from __future__ import annotations

import pytest

from hub.metrics import HubMetrics


@pytest.mark.attack("E9")
def test_a_count_that_no_request_can_have_does_not_spoil_the_counter() -> None:
    metrics = HubMetrics()
    for tokens in (3, -1, 1 << 63, 1 << 25, 4):
        metrics.count_tokens(0, {"completion_tokens": tokens})
    labels = {"stage": "0", "type": "completion"}
    assert metrics.registry.get_sample_value("omni_hub_tokens_total", labels) == 7
