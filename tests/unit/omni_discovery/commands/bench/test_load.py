"""The sender of a load test, beside hubs that answer, stand still or are gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from random import Random

import pytest

from omni_discovery.commands.bench import load as load_module
from omni_discovery.commands.bench.client import UNREACHABLE, Answered
from omni_discovery.commands.bench.load import LoadRun
from omni_discovery.commands.bench.plan import Asking, LoadPlan
from omni_discovery.commands.bench.reading import ChatReading


class FakeHub:
    """Answers each request after ``serve``; knows how many it had at once."""

    def __init__(self, serve: Callable[[], Awaitable[None]], failure: str = "") -> None:
        self._serve = serve
        self._failure = failure
        self.at_once = self.most_at_once = 0
        self.prompts: list[str] = []

    async def ask(self, asking: Asking, prompt: str) -> Answered:
        self.prompts.append(prompt)
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            await self._serve()
        finally:
            self.at_once -= 1
        reading = ChatReading()
        reading.firsts_s["text"] = time.perf_counter()
        return Answered(reading, 0 if self._failure else 200, self._failure)


def run_of(plan: LoadPlan, hub: FakeHub) -> LoadRun:
    return LoadRun(plan, Asking("m"), hub, str, Random(3).random)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110 - it is looked at from outside
            await asyncio.sleep(0.01)


async def test_a_closed_loop_has_so_many_on_their_way_and_no_more() -> None:
    hub = FakeHub(lambda: asyncio.sleep(0.01))
    summary = await run_of(LoadPlan(20, None, concurrency=4), hub).run()
    assert (summary.answered, summary.requests, hub.most_at_once) == (20, 20, 4)
    assert sorted(hub.prompts, key=int) == [str(number) for number in range(20)]


async def test_an_open_loop_does_not_wait_for_a_hub_that_stands_still_and_counts_the_wait() -> None:
    """1. the hub answers nothing until all 20 requests have been sent
    2. had the sender waited for an answer, the second would never have been sent
    3. the first to come has waited longest
    """
    go_on = asyncio.Event()

    async def stand_still() -> None:
        if hub.at_once == 20:
            go_on.set()
        await go_on.wait()

    hub = FakeHub(stand_still)
    run = run_of(LoadPlan(20, None, rate_per_s=100.0), hub)
    summary = await run.run()
    assert (summary.answered, hub.most_at_once) == (20, 20)
    wholes = [each.whole_s for each in sorted(run.tally.seen, key=lambda each: each.due_s)]
    assert wholes == sorted(wholes, reverse=True)


async def test_what_has_no_room_waits_here_and_that_wait_counts() -> None:
    """One at a time, 0.05 s each, all due nearly at once: the last has waited for the four before it."""
    hub = FakeHub(lambda: asyncio.sleep(0.05))
    run = run_of(LoadPlan(5, None, rate_per_s=10_000.0, most_in_flight=1), hub)
    summary = await run.run()
    assert hub.most_at_once == 1
    assert summary.whole is not None
    assert summary.whole.max_s > 0.24
    assert summary.late is not None
    assert summary.late.max_s > 0.19


async def test_what_was_due_and_never_sent_is_counted() -> None:
    """A hub that answers nothing in the time of the test: one is on its way, and the others never left."""
    never = asyncio.Event()

    async def serve() -> None:
        await never.wait()

    hub = FakeHub(serve)
    run = run_of(LoadPlan(None, 0.3, rate_per_s=100.0, most_in_flight=1), hub)
    running = asyncio.create_task(run.run())
    await until(lambda: run.seconds > 0.4 and run.unsent > 5)
    never.set()
    summary = await running
    assert summary.answered == 1
    assert summary.unsent > 5
    assert any("never sent" in doubt for doubt in summary.doubts)


async def test_an_interrupted_test_tells_what_it_has_and_what_still_waits() -> None:
    never = asyncio.Event()

    async def serve() -> None:
        if len(hub.prompts) > 3:
            await never.wait()

    hub = FakeHub(serve)
    run = run_of(LoadPlan(100, None, concurrency=2), hub)
    running = asyncio.create_task(run.run())
    await until(lambda: hub.at_once == 2)
    run.interrupt()
    summary = await running
    assert run.is_interrupted
    assert (summary.answered, summary.unfinished) == (3, 2)
    assert hub.at_once == 0


@pytest.mark.parametrize("rate_per_s", [None, 50.0])
async def test_a_hub_that_is_gone_ends_the_test(monkeypatch: pytest.MonkeyPatch, rate_per_s: float | None) -> None:
    monkeypatch.setattr(load_module, "_GONE_S", 0.3)
    monkeypatch.setattr(load_module, "_PAUSE_S", 0.02)
    hub = FakeHub(lambda: asyncio.sleep(0), UNREACHABLE)
    run = run_of(LoadPlan(1_000_000, None, rate_per_s=rate_per_s), hub)
    async with asyncio.timeout(30):
        summary = await run.run()
    assert run.is_gone
    assert summary.failed.keys() == {UNREACHABLE}


async def test_a_client_without_time_sees_that_itself() -> None:
    """Something blocks its loop again and again, as a machine that is too slow does."""

    async def block() -> None:
        time.sleep(0.05)  # noqa: ASYNC251 - that is what is tried
        await asyncio.sleep(0.01)

    summary = await run_of(LoadPlan(10, None), FakeHub(block)).run()
    assert summary.client.loop_lag is not None
    assert summary.client.loop_lag.p99_s > 0.02
    assert any("late (p99)" in doubt for doubt in summary.doubts)


async def test_an_error_of_our_own_is_not_swallowed() -> None:
    async def serve() -> None:
        raise RuntimeError("a bug")

    with pytest.raises(ExceptionGroup, match="unhandled errors"):
        await run_of(LoadPlan(1, None), FakeHub(serve)).run()
