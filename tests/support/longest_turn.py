"""How long a loop was held at most while something ran on it."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class LongestTurn:
    """The longest turn of the loop so far, in seconds of its thread's processor time."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def watch(self) -> None:
        """Take every turn of the loop."""
        while True:
            began_s = time.thread_time()
            await asyncio.sleep(0)
            self.longest_s = max(self.longest_s, time.thread_time() - began_s)


@asynccontextmanager
async def longest_turn() -> AsyncIterator[LongestTurn]:
    """Watch the running loop while the block runs."""
    turn = LongestTurn()
    # What is there already, of all tests, is none of the block's: to look through it takes long.
    gc.freeze()
    watching = asyncio.create_task(turn.watch())
    try:
        yield turn
    finally:
        watching.cancel()
        gc.unfreeze()
