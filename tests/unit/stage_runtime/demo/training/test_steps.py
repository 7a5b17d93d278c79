"""How far a training is, for people and for files."""

from __future__ import annotations

import io

from rich.console import Console

from stage_runtime.demo.training.steps import TrainingSteps


def shown(*, is_terminal: bool) -> str:
    file, moments = io.StringIO(), iter((0.0, 7.0, 9.0))
    console = Console(file=file, force_terminal=is_terminal, width=80, color_system=None)
    with TrainingSteps(4, 2, console, lambda: next(moments)) as steps:
        for step in range(1, 5):
            steps.done(step, loss=float(step), pitch=0.5)
    return file.getvalue()


def test_a_file_gets_a_line_now_and_then_with_the_means_since_the_last() -> None:
    assert shown(is_terminal=False).splitlines() == [
        "step 2/4 loss 1.50000 pitch 0.50000 7 s",
        "step 4/4 loss 3.50000 pitch 0.50000 9 s",
    ]


def test_a_terminal_gets_a_bar_that_is_full_at_the_end_and_no_line_of_it_wraps() -> None:
    text = shown(is_terminal=True)
    last = text.rpartition("\r")[2].rpartition("\x1b[2K")[2].splitlines()[0]
    assert "step 4/4" in last
    assert "loss 3.50000 pitch 0.50000" in last
    assert len(last) <= 80
