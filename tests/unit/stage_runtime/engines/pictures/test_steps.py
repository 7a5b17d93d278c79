"""Steps of a pipeline, heard at its scheduler."""

from __future__ import annotations

import pytest

from stage_runtime.engines.pictures.steps import steps_heard


class Scheduler:
    def step(self, sample: int) -> int:
        return sample + 1


def test_each_step_of_a_scheduler_is_heard_and_may_be_the_last() -> None:
    """1. a step returns what it did, and its number is told; 2. who hears may raise; 3. afterwards it is as before"""
    scheduler, heard = Scheduler(), list[int]()

    def listen(step: int) -> None:
        heard.append(step)
        if step == 3:
            raise RuntimeError("no more")

    with steps_heard(scheduler, listen):
        assert [scheduler.step(number) for number in (5, 6)] == [6, 7]
        with pytest.raises(RuntimeError, match="no more"):
            scheduler.step(7)
    assert heard == [1, 2, 3]
    assert scheduler.step(8) == 9
    assert "step" not in vars(scheduler)
