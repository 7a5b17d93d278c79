"""The pages of ``omni top``."""

from __future__ import annotations

import pytest

from omni_discovery.commands.history_log import Life
from omni_discovery.commands.top.pages import history_lines, request_line
from omni_discovery.receipts.receipt import ReceiptLine
from omni_discovery.view.recent_events import ShownEvent, Tone
from tests.support.terminal import HOSTILE

EVENTS = [
    ShownEvent(number=2, at=1000.0, tone=Tone.BAD, about="0/1", text="is lost"),
    ShownEvent(number=1, at=900.0, tone=Tone.GOOD, about="0/2", text="is up"),
]


def test_a_history_has_the_newest_process_first_and_only_this_replicas_events() -> None:
    older = Life(0, 1, 5, "alpha", 77, registered_at_s=100.0, is_gone=True, last_status="error", reason="no memory")
    newer = Life(0, 1, 9, "alpha", 78, registered_at_s=200.0, last_status="up")
    lines = history_lines([older, newer], EVENTS, "0/1", 80)
    said = "\n".join(lines)
    assert said.index("epoch 9 on alpha:78") < said.index("epoch 5 on alpha:77")
    assert "up now" in said
    assert "failed: no memory" in said
    assert "is lost" in said
    assert "0/2" not in said


def test_a_history_of_nothing_says_so() -> None:
    lines = history_lines([], [], "0/1", 80)
    assert "  none is known" in lines
    assert "  nothing has changed" in lines


@pytest.mark.attack("A18")
def test_no_page_says_anything_to_a_terminal() -> None:
    life = Life(0, 1, 5, HOSTILE, 77, registered_at_s=100.0, is_gone=True, last_status="error", reason=HOSTILE)
    line = ReceiptLine(request_id=HOSTILE, shown_id=HOSTILE, outcome="failed", error=HOSTILE, replicas=[HOSTILE])
    lines = [*history_lines([life], EVENTS, "0/1", 80), request_line(line, 200)]
    assert all(each.isprintable() for each in lines)


def test_a_request_says_how_long_it_took_and_where_it_went() -> None:
    line = ReceiptLine(request_id="r", shown_id="chatcmpl-1", took_s=1.25, outcome="ok", replicas=["0/0", "1/1"])
    assert request_line(line, 80).startswith("  1.25 s  ")
    assert request_line(line, 80).endswith("  ok         chatcmpl-1  0/0 1/1")
    assert len(request_line(line, 30)) == 30
    failed = ReceiptLine(request_id="r", outcome="failed", error="StageError")
    assert "failed StageError  r  nobody" in request_line(failed, 80)
