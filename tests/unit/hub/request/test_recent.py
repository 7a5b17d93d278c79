"""How many requests ended lately, and failed."""

from __future__ import annotations

import pytest

from hub.request.recent import RecentRequests


def test_failures_are_counted_by_stage_and_kind_with_the_moment_of_the_last() -> None:
    recent = RecentRequests(window_s=60.0)
    for at_s in (0.0, 5.0, 20.0):
        recent.count_end(at_s)
        recent.count_failure(1, "EngineFailedError", at_s)
    recent.count_end(21.0)
    recent.count_failure(None, "HubUnavailableError", 21.0)
    recent.count_end(22.0)
    assert recent.requests(30.0) == 5
    nobody, stage = recent.failures(30.0, 1030.0)
    assert (nobody.stage_id, nobody.failed, nobody.last_at) == (None, 1, 1021.0)
    assert (stage.stage_id, stage.failed, stage.kinds) == (1, 3, {"EngineFailedError": 3})
    assert stage.last_at == pytest.approx(1020.0)


def test_what_is_older_than_the_window_is_forgotten() -> None:
    recent = RecentRequests(window_s=60.0)
    recent.count_end(0.0)
    recent.count_failure(0, "EngineFailedError", 0.0)
    recent.count_end(65.0)
    assert recent.requests(69.0) == 2
    assert recent.requests(71.0) == 1
    assert recent.failures(71.0, 0.0) == []
    assert repr(recent) == "RecentRequests(1 requests)"


def test_failures_alone_are_forgotten_with_the_window_too() -> None:
    recent = RecentRequests(window_s=60.0)
    recent.count_failure(0, "EngineFailedError", 0.0)
    assert recent.failures(71.0, 0.0) == []


def test_requests_are_counted_over_the_window_alone() -> None:
    recent = RecentRequests(window_s=60.0)
    for number in range(10_000):
        recent.count_end(number / 10)
    assert recent.requests(1000.0) == 600


def test_the_most_frequent_kinds_are_named() -> None:
    recent = RecentRequests()
    for number, kind in enumerate("abcdef"):
        for _ in range(number + 1):
            recent.count_failure(0, kind, 0.0)
    (stage,) = recent.failures(0.0, 0.0)
    assert stage.failed == 21
    assert list(stage.kinds) == ["f", "e", "d", "c"]


def test_refusals_are_counted_by_stage_and_forgotten_with_the_window() -> None:
    recent = RecentRequests(window_s=60.0)
    assert recent.refused_s_ago(0, 5.0) == float("inf")
    recent.count_refusal(0, 0.0)
    recent.count_refusal(None, 20.0)
    assert recent.refused(21.0) == {0: 1, None: 1}
    assert recent.refused_s_ago(0, 21.0) == 21.0
    assert recent.refused(71.0) == {None: 1}
    assert recent.requests(21.0) == 0
