"""What a process waits for is shown where it can be, and costs the process nothing where it can't."""

from __future__ import annotations

from contextlib import closing

import pytest

from omni_discovery.clients import wait_board
from omni_discovery.clients.wait_board import WaitBoard
from omni_discovery.stories import Wait


@pytest.mark.attack("D2")
@pytest.mark.parametrize(
    "failure", [OSError(24, "Too many open files"), RuntimeError("can't start new thread")], ids=["files", "threads"]
)
def test_without_anything_left_for_its_thread_a_board_shows_nothing_and_raises_nothing(
    failure: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_thread(name: str) -> None:
        raise failure

    caplog.set_level("INFO")
    monkeypatch.setattr(wait_board, "LoopThread", no_thread)
    with closing(WaitBoard("127.0.0.1:1", "default")) as board:
        for _ in range(3):
            board.show([Wait(pid=1, since_s=0.0, who="the supervisor", reason="a replica")])
    assert caplog.text.count("waits.not_shown") == 1
    assert str(failure) in caplog.text
