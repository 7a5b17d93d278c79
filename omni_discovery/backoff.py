"""Waiting with backoff: for an event or a delay on a Clock, with growing pauses after failures.

``Backoff`` paces retries of a call, ``RestartPauses`` restarts of a process.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from omni_discovery.clock import Clock
from omni_discovery.errors import RegistryUnavailableError
from omni_discovery.log_once import LogOnce


async def wait_for_event(event: asyncio.Event, clock: Clock, timeout_s: float | None) -> bool:
    """Wait for ``event``, at most ``timeout_s`` on ``clock`` (None: without limit); return whether it is set."""
    if timeout_s is None:
        await event.wait()
    elif timeout_s > 0 and not event.is_set():
        await clock.wait(event, timeout_s)
    return event.is_set()


class Backoff:
    """Delays in seconds that double from ``first_s`` to ``most_s``, each shortened by jitter to no less than half.

    ``jitter`` returns a number from 0 to 1 each time.
    """

    def __init__(self, first_s: float, most_s: float, jitter: Callable[[], float] = random.random) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._jitter = jitter
        self._failures = 0
        #: Holds the kind of failure that came last.
        self._log_once = LogOnce(most_keys=1)

    def next_delay_s(self) -> float:
        """The wait after one more failure."""
        # 2**30 times the first delay is beyond any bound; a larger exponent would overflow.
        longest_s = min(self._most_s, self._first_s * 2.0 ** min(self._failures, 30))
        self._failures += 1
        return longest_s * (0.5 + 0.5 * self._jitter())

    def reset(self) -> None:
        """The call succeeded: begin at the first delay again; the next failure is news."""
        self._failures = 0
        self._log_once.clear()

    def log_level(self, error: BaseException, level: int = logging.WARNING) -> int:
        """The level to log this failure at: ``level`` if its type differs from the last failure's, else DEBUG.

        RegistryUnavailableError is always for DEBUG: the connection to etcd logs its outage itself, once.
        """
        is_news = self._log_once.should(type(error).__qualname__) and type(error) is not RegistryUnavailableError
        return level if is_news else logging.DEBUG


#: So many doublings are beyond any bound, and don't overflow.
_MOST_DOUBLINGS: Final = 30


@dataclass(slots=True)
class RestartPauses:
    """Pauses before restarts of a process, in seconds: doubling from ``first_s`` to ``most_s``.

    A process that served for ``stable_s`` begins with ``first_s`` again.
    """

    first_s: float = 0.5
    most_s: float = 30.0
    stable_s: float = 60.0
    #: Ends in a row of processes that served for less than ``stable_s``.
    quick_ends: int = 0

    def ended(self, served_for_s: float) -> float:
        """The pause after the process ended. ``served_for_s`` counts from when it was up, 0 if it never was."""
        self.quick_ends = 1 if served_for_s >= self.stable_s else self.quick_ends + 1
        return min(self.most_s, self.first_s * 2.0 ** min(self.quick_ends - 1, _MOST_DOUBLINGS))
