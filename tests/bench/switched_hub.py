"""``omni serve`` that stops to write receipts, or goes on, with each SIGUSR2, for ``tests.bench.receipts``.

Two processes differ by some percent from start to end, by where their memory lies alone. So one hub is measured with
and without receipts in turns: what the flag ``--receipts`` decides at the start is exchanged in what it has made.
"""

from __future__ import annotations

import gc
import signal
import sys
from typing import Any

from hub.orchestrator.dispatcher import Dispatcher
from hub.orchestrator.requests import Requests
from hub.pool.core import Pool
from omni_discovery.commands.main import main

#: What it says on its log when it has switched.
SAID = {True: "receipts are written", False: "receipts are not written"}


def _parts() -> list[tuple[Any, str, Any, Any]]:
    """Object, attribute, its value with receipts and without."""
    found: list[tuple[Any, str, Any, Any]] = []
    for each in gc.get_objects():
        if isinstance(each, Pool):
            found.append((each, "_snapshots", each._snapshots, None))
        elif isinstance(each, Requests):
            found.append((each, "_receipts", each._receipts, None))
        elif isinstance(each, Dispatcher):
            found.append((each, "_keeps_marks", True, False))
    return found


class _Switch:
    def __init__(self) -> None:
        self._parts: list[tuple[Any, str, Any, Any]] = []
        self._writes = True

    def __call__(self, *_: object) -> None:
        self._parts = self._parts or _parts()
        self._writes = not self._writes
        for each, name, written, not_written in self._parts:
            setattr(each, name, written if self._writes else not_written)
        sys.stderr.write(SAID[self._writes] + "\n")


if __name__ == "__main__":
    signal.signal(signal.SIGUSR2, _Switch())
    sys.exit(main())
