"""Draws for nothing, on a CPU: of a runner that does what vLLM's does with the generators of requests with a seed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stage_runtime.engines.draws import give_draws_of_runner_back


class Runner:
    """Draws one number for each request, and sets back the generators of those whose prompt is not read whole yet."""

    def __init__(self, device: str, unread: set[int]) -> None:
        self.device, self.unread = torch.device(device), unread
        self.input_batch = SimpleNamespace(generators={row: torch.Generator().manual_seed(7) for row in (0, 2)})

    def step(self) -> dict[int, float]:
        drawn = self._sample()
        self._bookkeeping_sync()
        return drawn

    def _sample(self) -> dict[int, float]:
        return {row: float(torch.rand((), generator=each)) for row, each in self.input_batch.generators.items()}

    def _bookkeeping_sync(self) -> None:
        for row in self.unread:
            generator: Any = self.input_batch.generators.get(row)
            if generator is not None:
                generator.set_offset(generator.get_offset() - 4)


def test_a_draw_behind_a_part_of_a_prompt_is_given_back_and_no_other_is() -> None:
    """1. of three requests, two with a seed, the prompts of two are read in two steps
    2. the one of those with a seed draws the same number again; the other with a seed goes on
    """
    runner = Runner("cpu", unread={0, 1})
    generators = runner.input_batch.generators
    give_draws_of_runner_back(runner)
    first, second = runner.step(), runner.step()
    runner.unread = set()
    third = runner.step()
    assert runner.input_batch.generators is generators
    assert first[0] == second[0] == third[0] == first[2]
    assert len({first[2], second[2], third[2]}) == 3


def test_without_it_such_a_step_fails_on_a_cpu() -> None:
    with pytest.raises(RuntimeError, match="does not use offset"):
        Runner("cpu", unread={0}).step()


@pytest.mark.parametrize("runner", [Runner("meta", unread=set()), None, SimpleNamespace(device=torch.device("cpu"))])
def test_other_runners_stay_as_they_are(runner: Any) -> None:
    before = dict(vars(runner)) if runner is not None else {}
    give_draws_of_runner_back(runner)
    assert runner is None or vars(runner) == before
