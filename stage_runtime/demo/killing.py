"""ReplicaKiller: the demo's end of the socket over which its hub asks for replicas to be killed, for the dashboard."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

logger = logging.getLogger(__name__)


class KillAsked(msgspec.Struct, frozen=True):
    """A line from the hub: the replica that a person wants killed."""

    stage_id: int
    replica_id: int
    pid: int


class ReplicaKiller:
    """Kills with SIGKILL what the hub asks for, if it is one of the hub's own processes. Closed with the hub.

    ``descendants`` gives the processes that the hub has started; ``on_kill`` hears of each that was killed.
    """

    def __init__(self, descendants: Callable[[], Collection[int]], on_kill: Callable[[int], None]) -> None:
        self._descendants = descendants
        self._on_kill = on_kill
        self._own, self.hub_end = socket.socketpair()
        threading.Thread(target=self._run, name="demo-killer", daemon=True).start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        for each in (self._own, self.hub_end):
            each.close()

    def _run(self) -> None:
        try:
            with self._own.makefile("rwb") as lines:
                for line in lines:
                    lines.write(msgspec.json.encode({"error": self._kill(line)}) + b"\n")
                    lines.flush()
        except (OSError, ValueError):
            # The hub, or the demo, has ended.
            return

    def _kill(self, line: bytes) -> str:
        """Do what a line asks for; return why it was not done, empty if it was."""
        try:
            asked = msgspec.json.decode(line, type=KillAsked)
        except msgspec.DecodeError as error:
            return f"the demo does not understand its hub: {error}"
        if asked.pid not in self._descendants():
            return f"process {asked.pid} is none of this demo: it has ended already, or runs elsewhere"
        try:
            os.kill(asked.pid, signal.SIGKILL)
        except ProcessLookupError:
            return f"process {asked.pid} has ended already"
        self._on_kill(asked.pid)
        return ""
