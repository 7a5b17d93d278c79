"""Which process made a file in shared memory, and whether it still lives.

A process id alone can be given anew, so its start time goes with it; and it means nothing in another container, so the
process id namespace goes with both.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_NAME: Final = re.compile(r"([0-9]+)-([0-9]+)-([0-9]+)")


@dataclass(frozen=True, slots=True)
class Owner:
    """One process. ``started`` is in clock ticks since the machine's start."""

    pid: int
    started: int
    pid_namespace: int

    @property
    def name(self) -> str:
        """A form for file names."""
        return f"{self.pid_namespace}-{self.pid}-{self.started}"

    @classmethod
    def parse(cls, name: str) -> Owner | None:
        """The owner that ``name`` was made from; None if it is no such name."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        pid_namespace, pid, started = (int(part) for part in found.groups())
        return cls(pid, started, pid_namespace)

    @classmethod
    def of(cls, pid: int) -> Owner | None:
        """The living process with that id; None if there is none."""
        try:
            # The name in parentheses may hold spaces; the fields after it do not.
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            return None
        if fields[0] == "Z":
            return None
        return cls(pid, int(fields[19]), _pid_namespace())

    def is_dead(self) -> bool:
        """Whether the process is surely gone. False for processes of other containers: we can't know."""
        return self.pid_namespace == _pid_namespace() and Owner.of(self.pid) != self


def _pid_namespace() -> int:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


#: This process, by the id it had then: a fork makes it another.
_known: dict[int, Owner] = {}


def me() -> Owner:
    """The calling process."""
    pid = os.getpid()
    if pid not in _known:
        _known.clear()
        _known[pid] = Owner.of(pid) or Owner(pid, 0, _pid_namespace())
    return _known[pid]
