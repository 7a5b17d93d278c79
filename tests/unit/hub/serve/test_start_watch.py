"""How long a starting hub waits for its stages."""

from __future__ import annotations

from hub.pool.status import StageStatus
from hub.serve.start_watch import StartWatch


def stages(*pickable: int) -> list[StageStatus]:
    return [StageStatus(number, 2, count, "2 registered: 2 starting") for number, count in enumerate(pickable)]


def test_a_hub_whose_stages_are_not_there_in_time_has_to_end_and_says_which() -> None:
    watch = StartWatch(60.0, 100.0)
    assert watch.overdue(stages(1, 0), 159.9) == ""
    said = watch.overdue(stages(1, 0), 160.0)
    assert said.startswith("not ready within 60 s (--init-timeout): no replica can take work of stage 1 (2 registered")


def test_a_hub_that_was_ready_once_goes_on_whatever_becomes_of_its_replicas() -> None:
    watch = StartWatch(60.0, 100.0)
    assert watch.is_waiting
    assert watch.overdue(stages(1, 1), 120.0) == ""
    assert not watch.is_waiting
    assert watch.overdue(stages(0, 0), 500.0) == ""


def test_without_a_limit_a_hub_waits() -> None:
    watch = StartWatch(None, 0.0)
    assert not watch.is_waiting
    assert watch.overdue(stages(0), 1e9) == ""
