"""Waits for an event or a delay, ended from outside."""

from __future__ import annotations

import asyncio

import pytest

from omni_discovery.backoff import wait_for_event
from omni_discovery.clock import SystemClock


@pytest.mark.parametrize("turns", range(8))
async def test_a_wait_that_is_cancelled_in_the_moment_of_its_end_is_cancelled(turns: int) -> None:
    """1. a loop waits for an event; 2. it is set; 3. so many turns of the loop later the task is cancelled: it ends."""
    event = asyncio.Event()

    async def wait_again_and_again() -> None:
        while True:
            await wait_for_event(event, SystemClock(), 60.0)
            event.clear()

    task = asyncio.create_task(wait_again_and_again())
    await asyncio.sleep(0.01)
    event.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task], timeout=0.5)
    was_cancelled = task.cancelled()
    task.cancel()
    assert was_cancelled
