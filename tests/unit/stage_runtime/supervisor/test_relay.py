"""The lines of replicas, as their supervisor prints them."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest

from stage_runtime.supervisor.relay import LineBuffer, LineSource, relay_line


class Stderr:
    """Holds back what was not flushed, as a pipe's buffer does; a full one raises."""

    def __init__(self, *, is_full: bool = False) -> None:
        self.raw = io.BytesIO()
        self.is_full = is_full
        self.buffer: Any = self
        self._held = b""

    def write(self, data: bytes) -> None:
        if self.is_full:
            raise OSError(28, "No space left on device")
        self._held += data

    def flush(self) -> None:
        self.raw.write(self._held)
        self._held = b""


def relayed(
    monkeypatch: pytest.MonkeyPatch, source: LineSource, line: bytes, *, is_json: bool = False, is_full: bool = False
) -> bytes:
    """What has reached whoever reads the supervisor's lines."""
    stderr = Stderr(is_full=is_full)
    monkeypatch.setattr(sys, "stderr", stderr)
    relay_line(source, line, is_json=is_json)
    monkeypatch.undo()
    return stderr.raw.getvalue()


def test_a_line_is_printed_at_once_and_says_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    source = LineSource(stage_id=3, pid=42)
    assert relayed(monkeypatch, source, b"hello") == b"[stage 3 pid 42] hello\n"
    told = json.loads(relayed(monkeypatch, source, b"hello", is_json=True))
    assert (told["stage"], told["pid"]) == (3, 42)
    assert "hello" in json.dumps(told)


def test_an_empty_line_is_no_object_of_json(monkeypatch: pytest.MonkeyPatch) -> None:
    source = LineSource(stage_id=3, pid=42)
    assert relayed(monkeypatch, source, b" ", is_json=True) == b""
    assert relayed(monkeypatch, source, b"") == b"[stage 3 pid 42] \n"


def test_on_a_full_disk_a_line_is_lost_and_nothing_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    assert relayed(monkeypatch, LineSource(stage_id=3, pid=42), b"hello", is_full=True) == b""


@pytest.mark.attack("Z22")
def test_a_line_that_does_not_end_comes_in_pieces() -> None:
    """As a library that shows its progress with carriage returns alone prints: nothing of it is kept for ever."""
    buffer, lines = LineBuffer(), list[bytes]()
    for _ in range(50):
        lines += buffer.add(b"step\r" * 13_000)
    lines += buffer.add(b"done\nand ")
    rest = buffer.take_rest()
    assert b"".join([*lines, rest]) == b"step\r" * 650_000 + b"done" + b"and "
    assert rest == b"and "
    assert max(map(len, lines)) <= (1 << 20) + 65_536
    assert len(lines) == 3
    assert buffer.add(b"next\n") == [b"next"]
