"""Commands on a terminal of 80 columns, and what of their output a terminal would obey."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.processes import DEFAULTS, OMNI

#: Sets a title, clears the screen, hides text (as C0 and as C1), turns the direction of writing, has no width, forges
#: a line.
HOSTILE = (
    "\x1b]0;owned\x07\x1b[2J\x1b[8m\x9b2J\u009d0;t\u009c\u202eowned\u2066\u2069\u200b\x7f\x08\r\n"
    "2026-01-01 00:00:00 ERROR   forged.line [red]not a style[/] :smile:"
)
#: What ``rich`` writes of its own: colours, and the cursor of a live table.
_OF_RICH = re.compile(r"\x1b\[(?:[0-9;]*m|\?25[lh]|1A|2K)")


def on_terminal(words: Sequence[str], folder: Path, stop_at: str = "") -> str:
    """What ``omni`` with these words writes to a terminal; with ``stop_at`` it is interrupted a second after that."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 80, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in DEFAULTS}
    environment |= {"XDG_RUNTIME_DIR": str(folder), "TERM": "xterm-256color"}
    child = subprocess.Popen(
        [*OMNI, *words], stdin=slave, stdout=slave, stderr=slave, env=environment, cwd=folder, start_new_session=True
    )
    os.close(slave)
    written, stop_at_s = b"", float("inf")
    os.set_blocking(master, False)
    try:
        deadline_s = time.monotonic() + 60.0
        while time.monotonic() < deadline_s:
            if time.monotonic() > stop_at_s:
                child.send_signal(signal.SIGINT)
                stop_at_s = float("inf")
            has_ended = child.poll() is not None
            try:
                written += os.read(master, 65536)
                if stop_at and stop_at.encode() in written:
                    stop_at, stop_at_s = "", time.monotonic() + 1.0
                continue
            except BlockingIOError:
                pass
            except OSError:
                break
            if has_ended:
                break
            time.sleep(0.02)
    finally:
        child.kill()
        child.wait()
        os.close(master)
    return written.decode("utf-8", "surrogateescape")


def obeyed(text: str) -> list[str]:
    """What is left in the output that a terminal would obey, or that it would not show as it stands."""
    assert "\x1b[8m" not in text, "hidden text"
    rest = _OF_RICH.sub("", text)
    return sorted({ascii(char) for char in rest if not char.isprintable() and char not in "\r\n"} | _unseen(rest))


def _unseen(text: str) -> set[str]:
    """What is printable by Python's word and yet not seen: of no width, blank, or a heap of marks."""
    found = {ascii(char) for char in text if char in "\u034f\ufe0f\U000e0100\u180b\u17b4\u3164\u115f\uffa0\u2800"}
    return found | {ascii(heap) for heap in re.findall("[\u0300-\u036f]{3,}", text)}
