"""When a replica that does not answer has failed, and how often that counts."""

from __future__ import annotations

import pytest

from hub.pool.silence import Silence

LIMIT_S = 5.0


@pytest.mark.attack("G4")
def test_a_replica_that_is_only_late_has_not_failed() -> None:
    """A hundred dispatches, each late by 0.1 s: it is busy with one large request, and answers in between."""
    silence = Silence()
    for number in range(100):
        now_s = 10.0 + number
        assert not silence.is_failure(0.1, now_s, LIMIT_S)
        if number % 4 == 3:
            silence.end()


@pytest.mark.attack("G4")
def test_a_silence_counts_once_however_many_wait() -> None:
    silence = Silence()
    assert [silence.is_failure(LIMIT_S, 20.0, LIMIT_S) for _ in range(50)] == [True] + [False] * 49


def test_a_silence_counts_again_each_time_that_it_has_lasted_as_long_again() -> None:
    """Each dispatch moves on after 0.1 s, so none of them waits for long; one comes each second."""
    silence = Silence()
    failed_s = [now_s for now_s in range(100, 120) if silence.is_failure(0.1, float(now_s), LIMIT_S)]
    assert failed_s == [105, 111, 117]


def test_an_answer_ends_a_silence() -> None:
    silence = Silence()
    assert not silence.is_failure(0.1, 100.0, LIMIT_S)
    silence.end()
    assert not silence.is_failure(0.1, 105.0, LIMIT_S)
    assert silence.is_failure(0.1, 109.9, LIMIT_S)


def test_one_dispatch_without_an_answer_for_so_long_is_a_failure_also_if_others_are_answered() -> None:
    silence = Silence()
    silence.end()
    assert silence.is_failure(LIMIT_S, 100.0, LIMIT_S)
    silence.end()
    assert silence.is_failure(LIMIT_S, 105.0, LIMIT_S)
