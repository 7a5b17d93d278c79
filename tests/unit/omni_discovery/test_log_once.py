"""A line that comes again and again is logged once."""

from __future__ import annotations

import pytest

from omni_discovery.log_once import LinePace, LogOnce


def test_a_line_is_logged_once_for_each_key() -> None:
    log_once = LogOnce()
    assert [log_once.should(key) for key in ("a", "b", "a", "b")] == [True, True, False, False]


def test_a_line_may_come_again_after_its_interval() -> None:
    now_s = [100.0]
    log_once = LogOnce(lambda: now_s[0])
    assert log_once.should("a", every_s=10.0)
    now_s[0] = 109.9
    assert not log_once.should("a", every_s=10.0)
    now_s[0] = 110.0
    assert log_once.should("a", every_s=10.0)


def test_what_was_forgotten_is_news_again_and_says_whether_it_was_logged() -> None:
    log_once = LogOnce()
    assert not log_once.forget("a")
    log_once.should("a")
    assert log_once.forget("a")
    assert log_once.should("a")
    log_once.should("b")
    log_once.clear()
    assert log_once.should("a")
    assert log_once.should("b")


def test_a_thousand_keys_are_remembered_and_the_oldest_goes_first() -> None:
    log_once = LogOnce(most_keys=3)
    for key in "abcd":
        log_once.should(key)
    assert [log_once.should(key) for key in "dcb"] == [False, False, False]
    assert log_once.should("a")


def test_with_one_key_a_line_is_logged_whenever_it_differs_from_the_last() -> None:
    log_once = LogOnce(most_keys=1)
    assert [log_once.should(key) for key in "aabba"] == [True, False, True, False, True]


@pytest.mark.attack("Z16")
def test_of_many_lines_some_are_logged_at_once_and_then_one_each_second() -> None:
    now_s = [100.0]
    pace = LinePace(lambda: now_s[0], 3)
    assert [pace.may_log() for _ in range(10)] == [True] * 3 + [False] * 7
    assert pace.take_left_out() == 7
    now_s[0] += 1.5
    assert [pace.may_log() for _ in range(3)] == [True, False, False]
    now_s[0] += 1000.0
    assert [pace.may_log() for _ in range(5)] == [True] * 3 + [False] * 2
    assert (pace.take_left_out(), pace.take_left_out()) == (4, 0)
