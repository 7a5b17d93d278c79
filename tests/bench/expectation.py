"""What a hub's process waits for, and when it came: the same for each system, so that the times compare."""

from __future__ import annotations

import threading

from tests.bench.actors import now_s


class Expectation:
    """One replica, by address, with a queue length, or gone. Set by one thread, met by another."""

    def __init__(self) -> None:
        self._met = threading.Event()
        self._address = ""
        self._queue_length: int | None = None
        self._met_at_s = 0.0

    def arm(self, address: str, queue_length: int | None) -> None:
        """Wait for this replica to be up with this queue length; None: to be up no more."""
        self._met.clear()
        self._queue_length = queue_length
        # Written last: whoever finds it sees the rest too.
        self._address = address

    def note(self, address: str, queue_length: int | None) -> None:
        """A replica is now seen so, None: as gone. Counted the first time."""
        if address == self._address and queue_length == self._queue_length and not self._met.is_set():
            self._met_at_s = now_s()
            self._met.set()

    @property
    def address(self) -> str:
        """The replica that is waited for."""
        return self._address

    def seen(self, timeout_s: float) -> float:
        """The moment at which it was met; 0.0 if that did not happen in time."""
        return self._met_at_s if self._met.wait(timeout_s) else 0.0
