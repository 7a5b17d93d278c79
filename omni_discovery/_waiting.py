"""How drivers wait: for an event or a delay on their Clock, and ever longer after failures."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable

from omni_discovery.clock import Clock
from omni_discovery.errors import RegistryUnavailableError


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
        #: The kind of failure that was told last.
        self._told: type[BaseException] | None = None

    def next_delay_s(self) -> float:
        """The wait after one more failure."""
        # Past 2**30 a longer delay than any bound; the exponent must not grow for ever.
        longest_s = min(self._most_s, self._first_s * 2.0 ** min(self._failures, 30))
        self._failures += 1
        return longest_s * (0.5 + 0.5 * self._jitter())

    def reset(self) -> None:
        """Something worked: begin at the first delay again, and tell the next failure."""
        self._failures = 0
        self._told = None

    def loudness(self, error: BaseException, level: int = logging.WARNING) -> int:
        """At which level to log this failure: ``level`` for news, else DEBUG.

        That etcd is away is no news: its connection has said so, once.
        """
        is_news = type(error) is not self._told and type(error) is not RegistryUnavailableError
        self._told = type(error)
        return level if is_news else logging.DEBUG
