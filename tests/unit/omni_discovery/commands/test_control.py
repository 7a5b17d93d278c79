"""What ``omni drain`` shows while a person waits for it."""

from __future__ import annotations

from typing import Any

import pytest

from omni_discovery.commands.control import _Progress
from omni_discovery.commands.operate import DrainStep


def test_a_drain_that_goes_on_says_so_each_ten_seconds_and_at_each_change(capsys: pytest.CaptureFixture[str]) -> None:
    """Where no terminal shows a line that moves, as in a pipe or in the log of a unit."""
    now_s, target = [0.0], "0/1"
    progress = _Progress(any_target(target), 7, lambda: now_s[0])
    with progress:
        for at_s, in_flight in ((0.0, 3), (4.0, 3), (9.9, 3), (10.0, 3), (12.0, 2), (21.0, 2), (22.0, 2)):
            now_s[0] = at_s
            progress.show(DrainStep(in_flight, frozenset()))
    assert capsys.readouterr().out.splitlines() == [
        f"draining 0/1 (epoch 7): {in_flight} in flight" for in_flight in (3, 3, 2, 2)
    ]
    assert progress.in_flight == 2


def any_target(name: str) -> Any:
    """What is printed of a target."""
    return name
