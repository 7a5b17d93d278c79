"""What a demo says while its models load, where no terminal shows its table."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from omni_discovery.view.table import View
from stage_runtime.demo.pipeline import _PlainProgress, progress_line, replicas_line, share_up


def test_a_line_is_written_every_few_seconds_and_none_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    written = {is_terminal: io.StringIO() for is_terminal in (False, True)}
    for is_terminal, file in written.items():
        console = Console(file=file, force_terminal=is_terminal, width=80)
        plain = _PlainProgress(console, 90.0)
        for at_s, text in ((100.0, "[a]"), (101.0, "b"), (104.9, "b"), (105.0, "b"), (110.0, "b"), (135.0, "b")):
            now_s[0] = at_s
            plain.tell(text)
    # What stays the same is said again after half a minute only.
    assert written[False].getvalue().splitlines() == ["[a] (10 s)", "b (15 s)", "b (45 s)"]
    assert written[True].getvalue() == ""


def test_each_replica_is_named_with_its_phase_until_it_is_up() -> None:
    def info(replica_id: int, status: ReplicaStatus, phase: str, progress: float = 0.0) -> ReplicaInfo:
        return ReplicaInfo("a", "b", 0, status, 0, 0.0, 0.0, replica_id, phase=phase, progress=progress)

    infos = {
        (0, 0): info(0, ReplicaStatus.UP, "ready"),
        (0, 1): info(1, ReplicaStatus.STARTING, "loading the model", 0.4),
        (0, 2): info(2, ReplicaStatus.DRAINING, ""),
    }
    assert replicas_line(View(replicas=infos), 4) == "1 of 4 up, 0/1 starting 40% loading the model, 0/2 draining"
    assert share_up(View(replicas=infos), 4) == pytest.approx(0.35)
    assert replicas_line(View(), 4) == "0 of 4 up"
    assert share_up(View(), 4) == 0.0


def test_the_bar_stands_on_one_line_of_80_columns_with_its_text() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, color_system=None)
    console.print(progress_line("loading the models · 600 s", 0.5), "what follows")
    first, second = file.getvalue().splitlines()
    assert "loading the models · 600 s" in first
    assert "━" in first
    assert len(first) <= 80
    assert second == "what follows"
