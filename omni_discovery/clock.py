"""Clock: where the drivers take time and waiting from, so that tests can pass in another."""

from __future__ import annotations

import asyncio
import contextlib
import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Time for one driver: deadlines, displayed times and sleeps."""

    def monotonic_s(self) -> float:
        """Seconds that only ever grow; all deadlines are counted on it."""

    def wall_s(self) -> float:
        """Seconds since 1970, for people to read; no decision depends on it."""

    async def sleep(self, delay_s: float) -> None:
        """Wait. Cancellable."""

    async def wait(self, event: asyncio.Event, delay_s: float) -> None:
        """Wait for ``event``, at most so long. Cancellable."""


def utc_time(wall_s: float) -> str:
    """A wall-clock moment for people to read, such as ``2026-01-31T09:05:07.250Z``."""
    moment = datetime.fromtimestamp(wall_s, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class SystemClock:
    """The operating system's clock and asyncio's sleep."""

    def monotonic_s(self) -> float:
        """See Clock."""
        return time.monotonic()

    def wall_s(self) -> float:
        """See Clock."""
        return time.time()

    async def sleep(self, delay_s: float) -> None:
        """See Clock."""
        await asyncio.sleep(delay_s)

    async def wait(self, event: asyncio.Event, delay_s: float) -> None:
        """See Clock."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await event.wait()
