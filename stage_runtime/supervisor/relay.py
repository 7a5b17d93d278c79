"""What replicas print, on the supervisor's standard error: each line says whose it is."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from omni_discovery.logs.lines import relayed_line

#: More than the longest record of a log takes: nothing that is longer is a line.
_MOST_LINE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class LineSource:
    """The process that has printed a line. Its ``replica`` name is empty until it is registered, ``pid`` 0 if unknown.

    The number of its start is no name: etcd decides the replica id, in another order.
    """

    stage_id: int
    replica: str = ""
    pid: int = 0

    @property
    def prefix(self) -> str:
        """What stands before its lines of text."""
        if self.replica:
            return f"[replica {self.replica}] "
        return f"[stage {self.stage_id} pid {self.pid}] " if self.pid else f"[stage {self.stage_id}] "

    @property
    def pair(self) -> str:
        """How the supervisor's own log lines name it."""
        return f"replica={self.replica}" if self.replica else f"pid={self.pid or '-'}"

    @property
    def fields(self) -> dict[str, Any]:
        """What the JSON object around one of its lines says of it."""
        named: dict[str, Any] = {"stage": self.stage_id}
        if self.replica:
            named["replica"] = self.replica
        return {"pid": self.pid, **named} if self.pid else named


class LineBuffer:
    """Makes lines of what comes through a pipe."""

    def __init__(self) -> None:
        self._unfinished = b""

    def add(self, content: bytes) -> list[bytes]:
        """The lines that are complete now. One that gets too long comes in pieces."""
        *lines, self._unfinished = (self._unfinished + content).split(b"\n")
        if len(self._unfinished) >= _MOST_LINE_BYTES:
            lines.append(self.take_rest())
        return lines

    def take_rest(self) -> bytes:
        """The line that was begun; empty if none was."""
        rest, self._unfinished = self._unfinished, b""
        return rest


def relay_line(source: LineSource, line: bytes, *, is_json: bool) -> None:
    """Print a line of a replica. On a full disk or a closed pipe the line is lost; the replicas run on."""
    if is_json:
        if not line.strip():
            return
        content = relayed_line(line, datetime.now(UTC), source.fields)
    else:
        content = source.prefix.encode() + line
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.buffer.write(content + b"\n")
        sys.stderr.buffer.flush()
