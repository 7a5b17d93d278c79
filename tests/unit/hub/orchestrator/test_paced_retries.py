"""Retries beyond the budget wait in line; those that nobody wants any more hold up nobody."""

from __future__ import annotations

import asyncio

from hub.orchestrator.retry_budget import PacedRetries, RetryDue
from hub.request import events as ev
from tests.support.quiet import soon_s


def dispatch(stage_id: int = 0) -> ev.Dispatch:
    return ev.Dispatch(stage_id, 1, {}, {}, (), (), frozenset(), is_retry=True)


async def test_a_retry_that_is_forgotten_takes_no_turn_from_those_behind_it() -> None:
    """1. the budget is spent, and 50 retries wait: five seconds at ten per second
    2. all but the last are given up
    3. it has the next turn
    """
    due: list[RetryDue] = []
    retries = PacedRetries(due.append)
    spent = 0
    while retries.may_go("spent", dispatch()):
        spent += 1
    assert spent == 20
    for number in range(50):
        assert not retries.may_go(str(number), dispatch())
    retries.forget("spent", 0)
    for number in range(49):
        retries.forget(str(number), 0)
    retries.forget("49", 1)
    assert len(retries) == 1
    async with asyncio.timeout(soon_s(1.0)):
        while not due:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert [each.request_id for each in due] == ["49"]
    retries.close()
