"""Clock: where the drivers take time and waiting from, so that tests can hand them another."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Time for one driver."""

    def monotonic_s(self) -> float:
        """Seconds that only ever grow; all deadlines are counted on it."""

    def wall_s(self) -> float:
        """Seconds since 1970, for people to read; nothing is decided by it."""

    async def sleep(self, delay_s: float) -> None:
        """Wait. Cancellable."""


class SystemClock:
    """The clock of the machine."""

    def monotonic_s(self) -> float:
        """See Clock."""
        return time.monotonic()

    def wall_s(self) -> float:
        """See Clock."""
        return time.time()

    async def sleep(self, delay_s: float) -> None:
        """See Clock."""
        await asyncio.sleep(delay_s)
