"""When the supervisor starts a replica again, and which devices it gets."""

from __future__ import annotations

import pytest

from omni_discovery.errors import ConfigError
from stage_runtime.restarts import (
    EXIT_CONFIG,
    EXIT_DONE,
    EXIT_DRAINED,
    EXIT_FAILED,
    GiveUp,
    RestartPolicy,
    Restarts,
    StartAgain,
    narrow_devices,
)

POLICY = RestartPolicy(first_delay_s=1.0, most_delay_s=5.0, stable_s=60.0, give_up_after=6)


def test_quick_ends_wait_longer_each_time_up_to_a_bound_and_then_it_is_a_crash_loop() -> None:
    restarts = Restarts(POLICY)
    decisions = [restarts.ended(-9, ran_for_s=2.0) for _ in range(6)]
    assert decisions[:5] == [StartAgain(1.0), StartAgain(2.0), StartAgain(4.0), StartAgain(5.0), StartAgain(5.0)]
    assert isinstance(decisions[5], GiveUp)
    assert decisions[5].exit_code == EXIT_FAILED


def test_who_ran_well_for_a_while_starts_with_a_clean_slate() -> None:
    """1. four quick ends, one short of the last delay
    2. then an hour of service and a crash: it is the first again
    """
    restarts = Restarts(POLICY)
    for _ in range(4):
        restarts.ended(1, ran_for_s=1.0)
    assert restarts.ended(1, ran_for_s=3600.0) == StartAgain(1.0)


def test_a_wrong_configuration_is_not_tried_again() -> None:
    decision = Restarts(POLICY).ended(EXIT_CONFIG, ran_for_s=0.5)
    assert isinstance(decision, GiveUp)
    assert decision.exit_code == EXIT_CONFIG


def test_an_end_with_code_0_that_nobody_asked_for_is_an_end_like_others() -> None:
    assert Restarts(POLICY).ended(0, ran_for_s=1.0) == StartAgain(1.0)


def test_who_was_drained_by_an_operator_stays_down_and_that_is_no_failure() -> None:
    decision = Restarts(POLICY).ended(EXIT_DRAINED, ran_for_s=1.0)
    assert isinstance(decision, GiveUp)
    assert decision.exit_code == EXIT_DONE


@pytest.mark.parametrize(
    ("devices", "count", "shares"),
    [
        ("", 2, ["", ""]),
        ("0", 1, ["0"]),
        ("0,1", 2, ["0", "1"]),
        ("0, 1, 2, 3", 2, ["0,1", "2,3"]),
        ("0,1", 4, ["0", "1", "0", "1"]),
        ("GPU-a,GPU-b", 2, ["GPU-a", "GPU-b"]),
    ],
)
def test_devices_are_shared_out_evenly(devices: str, count: int, shares: list[str]) -> None:
    assert [narrow_devices(devices, count, ordinal) for ordinal in range(count)] == shares


def test_devices_that_do_not_go_round_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"3 devices .* 2 replicas"):
        narrow_devices("0,1,2", 2, 0)
