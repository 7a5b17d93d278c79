"""Sees the steps of a pipeline that has no callback for them: each ends in its scheduler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def steps_heard(scheduler: Any, on_step: Callable[[int], None]) -> Iterator[None]:
    """Have ``on_step`` called with the number of steps done after each of the scheduler's; it may raise to end them."""
    steps = 0
    step_of_class = scheduler.step

    @functools.wraps(step_of_class)
    def step_and_say(*args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        made = step_of_class(*args, **kwargs)
        steps += 1
        on_step(steps)
        return made

    scheduler.step = step_and_say
    try:
        yield
    finally:
        del scheduler.step
