"""The lines that say whether a hub can serve."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any, cast

import pytest

from hub.pool.stage_pool import StageStatus
from hub.pool.status import FailureStreak
from hub.serve.readiness import HubReadiness, short_list


class Omni:
    """The part of AsyncOmni that is looked at."""

    is_revoked = False

    def __init__(self) -> None:
        self.stages = [StageStatus(0, 0, 0, "none is registered"), StageStatus(1, 2, 2)]
        self.serving = ("0/3", "1/0", "1/1")
        #: By name, where it is not 1.
        self.pids: dict[str, int] = {}

    def stage_status(self) -> tuple[StageStatus, ...]:
        return tuple(self.stages)

    def serving_replicas(self) -> dict[str, Hashable]:
        return {name: self.pids.get(name, 1) for name in self.serving}


def test_a_hub_says_what_it_waits_for_and_once_that_it_can_serve_and_that_it_can_not_any_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    now_s, omni = 100.0, Omni()
    readiness = HubReadiness("http://h:1", lambda: now_s)

    def told() -> list[tuple[int, str]]:
        readiness.check(cast("Any", omni), {0: 2, 1: 2})
        found = [(record.levelno, record.getMessage()) for record in caplog.records]
        caplog.clear()
        return found

    nobody = "no replica can take work of stage"
    assert told() == [
        (logging.INFO, f"hub.waiting after_s=0.0: {nobody} 0 (none is registered yet, 2 on the way here)")
    ]
    now_s = 102.5
    omni.stages[0] = StageStatus(0, 1, 1)
    ready = "hub.ready url=http://h:1 stages=0,1 replicas=0/3,1/0,1/1 after_s={}: every stage can serve"
    assert told() == [(logging.INFO, ready.format(2.5))]
    assert told() == []
    omni.stages[1] = StageStatus(1, 1, 0, "1 registered: 1 draining")
    gone = f"hub.not_ready url=http://h:1: {nobody} 1 (1 registered: 1 draining)"
    assert told() == [(logging.WARNING, gone)]
    omni.stages[1] = StageStatus(1, 1, 1)
    now_s = 104.0
    assert told() == [(logging.INFO, ready.format(1.5))]
    omni.stages[1] = StageStatus(1, 1, 1, failures=FailureStreak(5, now_s, ("EngineFailedError",)))
    assert told() == [(logging.WARNING, "hub.not_ready url=http://h:1: requests of stage 1 keep failing")]
    omni.stages[1] = StageStatus(1, 1, 1)
    assert [line for _, line in told()] == [ready.format(0.0)]
    omni.is_revoked = True
    assert [line for _, line in told()] == [
        "hub.not_ready url=http://h:1: no replica can take work of any stage: this hub is revoked"
    ]


def test_replicas_that_join_a_hub_that_is_ready_are_told_together_and_once(caplog: pytest.LogCaptureFixture) -> None:
    """1. the hub is ready with three; two more come within five seconds: one line names both
    2. one goes and comes back: no news; the next process has its id: news
    3. the hub is not ready for a while: the line that it is again names all
    """
    caplog.set_level(logging.INFO)
    now_s, omni = 100.0, Omni()
    omni.stages[0] = StageStatus(0, 1, 1)
    readiness = HubReadiness("http://h:1", lambda: now_s)

    def told() -> list[str]:
        readiness.check(cast("Any", omni), {0: 2, 1: 2})
        found = caplog.messages.copy()
        caplog.clear()
        return found

    assert [line.split()[0] for line in told()] == ["hub.ready"]
    before = omni.serving
    omni.serving = (*before, "0/1")
    now_s = 103.0
    assert told() == []
    omni.serving = (*before, "0/1", "1/2")
    now_s = 105.0
    assert told() == ["hub.joined replicas=0/1,1/2: 5 can serve now"]
    for omni.serving in (before, (*before, "0/1", "1/2")):
        now_s += 60.0
        assert told() == []
    omni.pids["0/1"] = 2
    now_s += 60.0
    assert told() == ["hub.joined replicas=0/1: 5 can serve now"]
    assert told() == []
    omni.serving, omni.stages[0] = (*before, "0/1", "0/9"), StageStatus(0, 1, 0, "1 registered: 1 draining")
    now_s += 60.0
    assert [line.split()[0] for line in told()] == ["hub.not_ready"]
    omni.stages[0] = StageStatus(0, 1, 1)
    (ready,) = told()
    assert "replicas=0/3,1/0,1/1,0/1,0/9 " in ready


def test_the_names_of_a_thousand_replicas_stay_one_short_line() -> None:
    assert short_list([f"0/{number}" for number in range(1000)]).endswith(",0/19,+980")
    assert short_list(()) == ""
