"""TrainingSteps: how far a training is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from types import TracebackType


class TrainingSteps:
    """A context around the steps of a training. ``every`` so many steps the means of what was told are shown."""

    def __init__(
        self, steps: int, every: int, console: Console | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._steps = steps
        self._every = every
        self._now = now
        self._began_s = now()
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._console = console or Console(highlight=False)
        self._bar = Progress(
            TextColumn("step {task.completed}/{task.total}", markup=False),
            BarColumn(bar_width=20),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=steps)

    def __enter__(self) -> TrainingSteps:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def done(self, step: int, **values: float) -> None:
        """A step, counted from 1, has ended with these values."""
        for name, value in values.items():
            self._sums[name] += value
        if step % self._every:
            self._bar.update(self._task, completed=step)
            return
        means = " ".join(f"{name} {total / self._every:.5f}" for name, total in self._sums.items())
        self._bar.update(self._task, completed=step, description=means)
        self._sums.clear()
        if not self._console.is_terminal:
            took_s = self._now() - self._began_s
            self._console.print(f"step {step}/{self._steps} {means} {took_s:.0f} s", markup=False, soft_wrap=True)
            self._console.file.flush()
