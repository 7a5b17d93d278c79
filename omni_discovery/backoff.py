"""How drivers wait: for an event or a delay on their Clock, and ever longer after failures.

How long to wait before a process that ended by itself is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from omni_discovery.clock import Clock
from omni_discovery.errors import RegistryUnavailableError
from omni_discovery.log_once import LogOnce


async def wait_for_event(event: asyncio.Event, clock: Clock, timeout_s: float | None) -> bool:
    """Wait for ``event``, at most ``timeout_s`` on ``clock`` (None: for ever); say whether it is set."""
    if timeout_s is None:
        await event.wait()
    elif timeout_s > 0 and not event.is_set():
        waits = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(clock.sleep(timeout_s))]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*waits, return_exceptions=True)
    return event.is_set()


class Backoff:
    """Delays that double from ``first_s`` to ``most_s``, each shortened by chance to no less than half."""

    def __init__(self, first_s: float, most_s: float, jitter: Callable[[], float] = random.random) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._jitter = jitter
        self._failures = 0
        #: Holds the kind of failure that came last.
        self._log_once = LogOnce(most_keys=1)

    def next_delay_s(self) -> float:
        """The wait after one more failure."""
        # Past 2**30 a longer delay than any bound; the exponent must not grow for ever.
        longest_s = min(self._most_s, self._first_s * 2.0 ** min(self._failures, 30))
        self._failures += 1
        return longest_s * (0.5 + 0.5 * self._jitter())

    def reset(self) -> None:
        """Something worked: begin at the first delay again, and tell the next failure."""
        self._failures = 0
        self._log_once.clear()

    def log_level(self, error: BaseException, level: int = logging.WARNING) -> int:
        """At which level to log this failure: ``level`` for news, else DEBUG.

        That etcd is away is no news: its connection has said so, once.
        """
        is_news = self._log_once.should(type(error).__qualname__) and type(error) is not RegistryUnavailableError
        return level if is_news else logging.DEBUG


#: Twice as long so often is beyond any bound, and still a number.
_MOST_DOUBLINGS: Final = 30


@dataclass(slots=True)
class RestartPauses:
    """Each pause is twice the one before, ``most_s`` at most; who served for ``stable_s`` begins with ``first_s``."""

    first_s: float = 0.5
    most_s: float = 30.0
    stable_s: float = 60.0
    #: Ends in a row, each before it was up or soon after.
    quick_ends: int = 0

    def ended(self, served_for_s: float) -> float:
        """The pause after an end, in seconds. ``served_for_s`` counts from when it was up, 0 if it never was."""
        self.quick_ends = 1 if served_for_s >= self.stable_s else self.quick_ends + 1
        return min(self.most_s, self.first_s * 2.0 ** min(self.quick_ends - 1, _MOST_DOUBLINGS))
