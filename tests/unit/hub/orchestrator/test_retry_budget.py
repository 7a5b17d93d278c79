"""Retries are a share of live traffic, and those beyond it wait their turn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hub.orchestrator.retry_budget import RetryBudget


def spend_all(budget: RetryBudget, now_s: float) -> int:
    taken = 0
    while budget.spend(now_s):
        taken += 1
    return taken


def test_a_burst_goes_at_once_and_the_next_waits_for_the_floor() -> None:
    budget = RetryBudget(100.0)
    assert spend_all(budget, 100.0) == 20
    assert budget.delay_s(100.0) == pytest.approx(0.1)
    assert budget.delay_s(100.0, ahead=4) == pytest.approx(0.5)
    assert not budget.spend(100.05)
    assert budget.spend(100.1)


def test_each_admitted_request_brings_a_fifth() -> None:
    budget = RetryBudget(0.0)
    spend_all(budget, 0.0)
    for _ in range(10):
        budget.admitted(0.0)
    assert spend_all(budget, 0.0) == 2


def test_much_traffic_may_be_retried_in_proportion_at_once() -> None:
    """200 requests a second for a minute: a fifth of what came in the last ten seconds; a minute later the burst."""
    budget = RetryBudget(0.0)
    for number in range(12_000):
        budget.admitted(number / 200)
    assert 350 <= spend_all(budget, 60.0) <= 450
    assert spend_all(budget, 120.0) <= 21


def test_a_clock_that_does_not_move_and_one_that_goes_back_bring_nothing() -> None:
    budget = RetryBudget(10.0)
    spend_all(budget, 10.0)
    assert not budget.spend(10.0)
    assert not budget.spend(5.0)
    assert budget.delay_s(5.0) == pytest.approx(0.1)


@pytest.mark.parametrize("wrong", [{"floor_per_s": 0.0}, {"share": 1.5}, {"burst": 0.5}])
def test_a_budget_under_which_a_turn_may_never_come_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="make no budget"):
        RetryBudget(0.0, **wrong)


@given(st.lists(st.tuples(st.floats(0, 0.5), st.sampled_from(["admitted", "retry", "retry"])), max_size=200))
def test_never_more_than_the_share_the_floor_and_the_burst_and_each_delay_is_kept(
    steps: list[tuple[float, str]],
) -> None:
    budget, now_s, taken, admitted = RetryBudget(0.0), 0.0, 0, 0
    for wait_s, what in steps:
        now_s += wait_s
        if what == "admitted":
            budget.admitted(now_s)
            admitted += 1
            continue
        delay_s = budget.delay_s(now_s)
        assert delay_s <= 0.1 + 1e-6
        now_s += delay_s
        assert budget.spend(now_s)
        taken += 1
        assert taken <= 20 + 0.2 * admitted + 10 * now_s + 1e-3
