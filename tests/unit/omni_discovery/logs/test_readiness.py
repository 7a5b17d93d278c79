"""Readiness is told when it changes, and ever more seldom while something is missing."""

from __future__ import annotations

from omni_discovery.logs.readiness import NotReady, ReadinessLog, Ready, StillMissing


def test_ready_is_told_once_and_so_is_its_loss() -> None:
    """1. at once what is missing; 2. once that nothing is, with the time; 3. the loss at once, then the return"""
    log = ReadinessLog(10.0)
    assert log.observe("stage 0", 10.0) == StillMissing(0.0)
    assert log.observe("", 12.5) == Ready(2.5)
    assert log.observe("", 13.0) is None
    assert log.observe("stage 1", 20.0) == NotReady()
    assert log.observe("stage 1", 20.5) is None
    assert log.observe("", 21.0) == Ready(1.0)


def test_one_that_is_ready_from_the_start_says_so() -> None:
    assert ReadinessLog(0.0).observe("", 0.5) == Ready(0.5)


def test_what_stays_missing_is_repeated_ever_more_seldom() -> None:
    log = ReadinessLog(0.0)
    told = [at_s for at_s in range(3600) if log.observe("stage 0", float(at_s))]
    assert told[:5] == [0, 5, 10, 20, 40]
    assert len(told) < 13


def test_a_change_of_what_is_missing_is_told_soon_and_not_for_ever() -> None:
    """1. phases of a start follow each other within seconds, and each is told
    2. one that changes all the time, for an hour, leaves few lines
    """
    log = ReadinessLog(0.0)
    news = [log.observe(phase, at_s) for at_s, phase in ((0.0, "a"), (0.5, "b"), (1.0, "b"), (1.5, "c"), (2.0, "c"))]
    assert news == [StillMissing(0.0), None, StillMissing(1.0), None, StillMissing(2.0)]
    assert sum(log.observe(str(at_s), float(at_s)) is not None for at_s in range(3, 3600)) < 80
