"""Who is let in, who is told to come back, and when."""

from __future__ import annotations

import pytest

from hub.orchestrator.admission import MOST_RETRY_S, Backlog, Bounds, RetryTimes, StageLoad, find_rejection

BOUNDS = Bounds(max_waiting=4, max_in_flight=100)


def test_what_the_slots_can_run_is_never_refused() -> None:
    assert find_rejection([StageLoad(0, 8, 8, 10.0)], BOUNDS, in_flight=8, timeout_s=1.0) is None


def test_a_full_queue_says_when_there_will_be_room() -> None:
    """8 slots work 2 s each, so one frees each 0.25 s; 14 on their way are 6 too many for a queue of 4: 3 x 0.25 s."""
    found = find_rejection([StageLoad(0, 14, 8, 2.0)], BOUNDS, in_flight=14, timeout_s=60.0)
    assert found is not None
    assert "stage 0" in found.reason
    assert found.retry_after_s == 1.0
    found = find_rejection([StageLoad(0, 14, 8, 20.0)], BOUNDS, in_flight=14, timeout_s=600.0)
    assert found is not None
    assert found.retry_after_s == 7.5


def test_those_that_are_turned_away_together_are_told_to_come_back_one_after_the_other() -> None:
    """1. 8 slots of 0.6 s and a full queue of 2048: one more is served each 75 ms, all of it in 154 s
    2. 447 are refused in one moment: the last is told half a minute, when the others will have been taken
    3. those that come back too early don't push the times beyond what the whole queue takes
    4. an hour later nobody is told of that any more
    """
    bounds, load = Bounds(max_waiting=2048, max_in_flight=4096), StageLoad(0, 2056, 8, 0.6)
    found = find_rejection([load], bounds, in_flight=2056, timeout_s=600.0)
    assert found is not None
    returns = RetryTimes()
    told_s = [returns.retry_after_s(found, 50.0) for _ in range(447)]
    assert told_s == sorted(told_s)
    assert 1.0 <= told_s[0] < 1.1
    assert 33.0 < told_s[-1] < 36.0
    for _ in range(5000):
        assert returns.retry_after_s(found, 50.0) <= 2048 * 0.075 + 0.1
    assert returns.retry_after_s(found, 3650.0) < 1.1


def test_a_full_queue_before_anything_was_served_is_taken_to_need_a_second_for_each() -> None:
    found = find_rejection([StageLoad(0, 14, 1, None)], BOUNDS, in_flight=14, timeout_s=600.0)
    assert found is not None
    assert found.retry_after_s == 10.0


def test_the_tightest_stage_of_the_path_decides() -> None:
    """A wide first stage and a narrow second one: what has yet to reach the second counts there already."""
    wide, narrow = StageLoad(0, 20, 64, 0.1), StageLoad(1, 20, 2, 30.0)
    found = find_rejection([wide, narrow], BOUNDS, in_flight=20, timeout_s=3600.0)
    assert found is not None
    assert "stage 1" in found.reason
    assert found.retry_after_s == (18 - 4 + 1) * 15.0
    assert find_rejection([wide], BOUNDS, in_flight=20, timeout_s=3600.0) is None


def test_a_deadline_that_can_not_be_met_is_refused_at_once() -> None:
    load = StageLoad(0, 11, 8, 40.0)
    found = find_rejection([load], BOUNDS, in_flight=11, timeout_s=10.0)
    assert found is not None
    assert "would begin in about 15 s" in found.reason
    assert find_rejection([load], BOUNDS, in_flight=11, timeout_s=20.0) is None


def test_hubs_share_the_slots() -> None:
    load = StageLoad(0, 8, 8, 100.0)
    assert find_rejection([load], Bounds(4, 100, live_hubs=2), in_flight=8, timeout_s=3600.0) is not None
    assert find_rejection([load], Bounds(4, 100, live_hubs=1), in_flight=8, timeout_s=3600.0) is None


@pytest.mark.attack("Z50")
def test_slots_that_this_hub_has_are_its_own_however_many_hubs_are_registered() -> None:
    """A thousand records of hubs that there are not, and eight requests at the eight slots."""
    bounds = Bounds(64, 100, live_hubs=1000)
    assert find_rejection([StageLoad(0, 24, 8, 5.0)], bounds, in_flight=24, timeout_s=600.0) is not None
    assert find_rejection([StageLoad(0, 24, 8, 5.0, own=8)], bounds, in_flight=24, timeout_s=600.0) is None
    behind = StageLoad(1, 24, 4, 5.0)
    assert find_rejection([StageLoad(0, 24, 8, 5.0, own=8), behind], bounds, in_flight=24, timeout_s=600.0) is None
    full = find_rejection([StageLoad(0, 72, 8, 5.0, own=9)], bounds, in_flight=72, timeout_s=600.0)
    assert full is not None
    assert full.seconds_each == 5.0 / 8


def test_a_stage_without_replicas_refuses_nobody_and_the_hub_has_its_own_bound() -> None:
    assert find_rejection([StageLoad(0, 50, 0, None)], BOUNDS, in_flight=50, timeout_s=1.0) is None
    found = find_rejection([StageLoad(0, 50, 0, None)], BOUNDS, in_flight=100, timeout_s=1.0)
    assert found is not None
    assert "bound of this hub" in found.reason


def test_the_wait_that_is_told_is_bounded() -> None:
    found = find_rejection([StageLoad(0, 10_000, 1, 60.0)], BOUNDS, in_flight=9, timeout_s=1e6)
    assert found is not None
    assert found.retry_after_s == MOST_RETRY_S


def test_a_request_counts_for_a_stage_until_it_has_passed_it() -> None:
    backlog = Backlog()
    backlog.enter("r", (0, 1))
    backlog.enter("s", (0,))
    assert (backlog.of(0), backlog.of(1), len(backlog)) == (2, 1, 2)
    backlog.passed("r", [0])
    backlog.passed("r", [0])
    backlog.passed("unknown", [0])
    assert (backlog.of(0), backlog.of(1)) == (1, 1)
    backlog.leave("r")
    backlog.leave("r")
    backlog.leave("s")
    assert (backlog.of(0), backlog.of(1), len(backlog)) == (0, 0, 0)


def test_a_request_that_waits_for_its_client_is_in_nobodys_way() -> None:
    """Set aside at any moment, once or twice, in any order with what else happens to it: counts come back to zero."""
    backlog = Backlog()
    backlog.enter("a", (0, 1))
    backlog.enter("b", (0, 1))
    backlog.set_aside("a", is_aside=True)
    backlog.set_aside("a", is_aside=True)
    assert (backlog.of(0), backlog.of(1), len(backlog)) == (1, 1, 2)
    backlog.passed("a", [0])
    assert (backlog.of(0), backlog.of(1)) == (1, 1)
    backlog.set_aside("a", is_aside=False)
    assert (backlog.of(0), backlog.of(1)) == (1, 2)
    backlog.set_aside("a", is_aside=True)
    backlog.enter("a", (1,), {1: "next"})
    assert (backlog.of(1), backlog.of(1, "next")) == (1, 0)
    backlog.set_aside("a", is_aside=False)
    assert backlog.of(1, "next") == 1
    backlog.set_aside("b", is_aside=True)
    backlog.leave("b")
    backlog.set_aside("b", is_aside=False)
    backlog.leave("a")
    assert (backlog.of(0), backlog.of(1), backlog.of(1, "next"), len(backlog)) == (0, 0, 0, 0)
    backlog.enter("b", (0,))
    assert backlog.of(0) == 1
