"""When the supervisor starts a replica again, and when there is no hope for it."""

from __future__ import annotations

from stage_runtime.supervisor.restarts import (
    EXIT_CONFIG,
    EXIT_DONE,
    EXIT_DRAINED,
    EXIT_FAILED,
    LeaveDown,
    RestartPolicy,
    Restarts,
    StartAgain,
)

POLICY = RestartPolicy(first_delay_s=1.0, most_delay_s=5.0, stable_s=60.0, loop_after=6)


def test_quick_ends_wait_longer_each_time_up_to_a_bound_and_then_it_is_a_crash_loop() -> None:
    restarts = Restarts(POLICY)
    decisions = [restarts.record_end(-9, served_for_s=2.0) for _ in range(5)]
    assert decisions == [StartAgain(1.0), StartAgain(2.0), StartAgain(4.0), StartAgain(5.0), StartAgain(5.0)]
    assert restarts.hopeless_code is None
    assert restarts.record_end(-9, served_for_s=2.0) == StartAgain(
        5.0, "it ended 6 times in a row soon after its start"
    )
    assert restarts.hopeless_code == EXIT_FAILED


def test_who_served_well_for_a_while_starts_with_a_clean_slate() -> None:
    """1. a crash loop; 2. then an hour of service and a crash: the first again"""
    restarts = Restarts(POLICY)
    for _ in range(7):
        restarts.record_end(1, served_for_s=1.0)
    assert restarts.hopeless_code == EXIT_FAILED
    assert restarts.record_end(1, served_for_s=3600.0) == StartAgain(1.0)
    assert restarts.hopeless_code is None


def test_a_wrong_configuration_is_hopeless_at_once_but_tried_again_for_it_may_be_corrected() -> None:
    restarts = Restarts(POLICY)
    assert restarts.record_end(EXIT_CONFIG, served_for_s=0.0) == StartAgain(5.0, "its configuration is wrong")
    assert restarts.hopeless_code == EXIT_CONFIG


def test_an_end_with_code_0_that_nobody_asked_for_is_an_end_like_others() -> None:
    assert Restarts(POLICY).record_end(0, served_for_s=1.0) == StartAgain(1.0)


def test_who_was_drained_by_an_operator_stays_down_and_that_is_no_failure() -> None:
    restarts = Restarts(POLICY)
    assert restarts.record_end(EXIT_DRAINED, served_for_s=1.0) == LeaveDown()
    assert restarts.hopeless_code == EXIT_DONE
