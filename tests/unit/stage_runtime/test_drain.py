"""When a drain is over, and how a process that can't close still ends."""

from __future__ import annotations

import logging
import threading

import pytest

from stage_runtime.lifecycle import Drain, Verdict
from stage_runtime.replica.replica import close_part, exit_deadline

FOR_EVER = float("inf")


def test_a_drain_waits_for_what_runs_and_for_the_hubs() -> None:
    """1. something runs; 2. nothing does, but a hub may still send; 3. all hubs know: done."""
    drain = Drain(ack_timeout_s=13.0)
    drain.request(100.0, 60.0)
    assert drain.verdict(101.0, 1) is Verdict.WAIT
    assert drain.verdict(102.0, 0) is Verdict.WAIT
    drain.is_acknowledged = True
    assert drain.verdict(102.1, 1) is Verdict.WAIT
    assert drain.verdict(102.2, 0) is Verdict.DONE


def test_hubs_that_say_nothing_are_waited_for_so_long_and_work_for_longer() -> None:
    drain = Drain(ack_timeout_s=13.0)
    drain.request(100.0, 60.0)
    assert drain.verdict(112.9, 0) is Verdict.WAIT
    assert drain.verdict(113.0, 0) is Verdict.DONE
    assert drain.verdict(159.9, 1) is Verdict.WAIT
    assert drain.verdict(160.0, 1) is Verdict.GIVE_UP


def test_the_bound_of_the_whole_drain_bounds_the_wait_for_hubs_too() -> None:
    drain = Drain(ack_timeout_s=13.0)
    drain.request(100.0, 2.0)
    assert drain.verdict(101.9, 0) is Verdict.WAIT
    assert drain.verdict(102.0, 0) is Verdict.DONE


def test_an_operator_has_no_bound_until_a_signal_sets_one_and_a_second_ends_it() -> None:
    """1. by the control key: work may take for ever, hubs may not
    2. SIGTERM: a bound; 3. another: none is left; a later, longer patience changes nothing
    """
    drain = Drain(ack_timeout_s=13.0)
    drain.request(100.0, FOR_EVER)
    assert not drain.is_bounded
    assert drain.verdict(10_000.0, 1) is Verdict.WAIT
    assert drain.verdict(113.0, 0) is Verdict.DONE
    drain.request(105.0, 60.0)
    assert drain.is_bounded
    assert drain.verdict(164.0, 1) is Verdict.WAIT
    drain.request(106.0, 0.0)
    assert drain.verdict(106.0, 1) is Verdict.GIVE_UP
    assert drain.verdict(106.0, 0) is Verdict.DONE
    drain.request(107.0, 60.0)
    assert drain.verdict(107.0, 1) is Verdict.GIVE_UP


def test_a_part_that_can_not_be_closed_does_not_keep_the_next_from_it(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise OSError("no")

    closed: list[str] = []
    close_part("engine", fail)
    close_part("sockets", lambda: closed.append("sockets"))
    assert closed == ["sockets"]
    assert [record.getMessage() for record in caplog.records] == ["replica.close_failed part=engine"]


def test_a_close_that_hangs_ends_the_process_with_the_code_that_it_had(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    ended = threading.Event()
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    with exit_deadline(0.05, 3, end):
        assert ended.wait(5.0)
    assert codes == [3]
    assert "replica.close_hung" in caplog.text


def test_a_close_in_time_ends_nothing() -> None:
    codes: list[int] = []
    with exit_deadline(0.1, 3, codes.append):
        pass
    assert not threading.Event().wait(0.3)
    assert codes == []


def test_a_registry_that_says_nothing_is_not_waited_for() -> None:
    """etcd is away: nobody can acknowledge, and a hub that still sends here is refused and goes elsewhere."""
    drain = Drain(ack_timeout_s=13.0)
    drain.request(100.0, 60.0)
    assert drain.verdict(101.4, 0, knows_hubs=False) is Verdict.WAIT
    assert drain.verdict(101.5, 1, knows_hubs=False) is Verdict.WAIT
    assert drain.verdict(101.5, 0, knows_hubs=False) is Verdict.DONE
    assert drain.verdict(101.5, 0, knows_hubs=True) is Verdict.WAIT
