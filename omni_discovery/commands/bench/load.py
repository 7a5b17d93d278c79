"""Sends the requests of a load test when they are due, and watches its own loop while it does."""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, Protocol

from omni_discovery.commands.bench.client import UNREACHABLE, Answered
from omni_discovery.commands.bench.figures import BenchSummary, ClientLoad, Seen, Tally, spread_of
from omni_discovery.commands.bench.plan import LoadPlan, arrivals

if TYPE_CHECKING:
    from omni_discovery.commands.bench.plan import Asking

#: How often the loop's lateness is measured.
_METER_S: Final = 0.02
#: A closed loop waits so long after a connection that was refused, and any test ends when none was made for so long.
_PAUSE_S, _GONE_S = 0.2, 5.0


class Asks(Protocol):
    """Asks a hub, as BenchClient does."""

    async def ask(self, asking: Asking, prompt: str) -> Answered:
        """Ask, and read to the end."""


class LoadRun:
    """One load test. ``prompt_of`` makes the prompt of a request by its number, ``draw`` the times of arrivals."""

    def __init__(
        self, plan: LoadPlan, asking: Asking, asks: Asks, prompt_of: Callable[[int], str], draw: Callable[[], float]
    ) -> None:
        self._plan = plan
        self._asking = asking
        self._asks = asks
        self._prompt_of = prompt_of
        self._draw = draw
        self._tasks: set[asyncio.Task[None]] = set()
        self._lags_s = array("d")
        self._began_s = 0.0
        self._began_cpu_s = 0.0
        self._unreachable_since_s: float | None = None
        self._stop = asyncio.Event()
        self.tally = Tally()
        #: When each request was due that is on its way, by its number.
        self.waiting_since_s: dict[int, float] = {}
        self.unsent = 0
        #: Whether somebody has ended the test, and whether it ended because the hub is gone.
        self.is_interrupted = self.is_gone = False

    def interrupt(self) -> None:
        """End the test now; what has been measured stays."""
        self.is_interrupted = True
        self._stop.set()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._began_s if self._began_s else 0.0

    async def run(self) -> BenchSummary:
        """Send all requests, and wait for their answers."""
        self._began_s, self._began_cpu_s = time.perf_counter(), time.process_time()
        sending = asyncio.create_task(self._send_open() if self._plan.is_open else self._send_closed())
        stopping = asyncio.create_task(self._stop.wait())
        async with self._metered():
            await asyncio.wait({sending, stopping}, return_when=asyncio.FIRST_COMPLETED)
            summary = self._summary()
            for task in (sending, stopping, *self._tasks):
                task.cancel()
            results = await asyncio.gather(sending, stopping, *self._tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return summary

    def _summary(self) -> BenchSummary:
        seconds = self.seconds
        busy_share = (time.process_time() - self._began_cpu_s) / max(seconds, 1e-9)
        client = ClientLoad(busy_share, spread_of(self._lags_s))
        waiting = [*self.waiting_since_s.values()]
        return self.tally.summary(seconds, client, waiting_since_s=waiting, unsent=self.unsent)

    async def _send_open(self) -> None:
        room = asyncio.Semaphore(self._plan.most_in_flight)
        over_s = self._plan.duration_s
        for number, due_s in enumerate(arrivals(self._plan, self._draw)):
            await asyncio.sleep(max(0.0, due_s - self.seconds))
            if not await _acquired(room, None if over_s is None else over_s - self.seconds):
                self.unsent += 1
                continue
            # From here on it is on its way, also while its task has not begun.
            self.waiting_since_s[number] = due_s
            task = asyncio.create_task(self._one(number, due_s))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda _task: room.release())
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _send_closed(self) -> None:
        numbers = self._numbers()

        async def keep_asking() -> None:
            for number in numbers:
                self.waiting_since_s[number] = self.seconds
                await self._one(number, self.waiting_since_s[number])
                if self._unreachable_since_s is not None:
                    await asyncio.sleep(_PAUSE_S)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._plan.concurrency):
                group.create_task(keep_asking())

    def _numbers(self) -> Iterator[int]:
        number = 0
        while (self._plan.requests is None or number < self._plan.requests) and (
            self._plan.duration_s is None or self.seconds < self._plan.duration_s
        ):
            yield number
            number += 1

    async def _one(self, number: int, due_s: float) -> None:
        prompt = self._prompt_of(number)
        sent_s = self.seconds
        answered = await self._asks.ask(self._asking, prompt)
        ended_s, reading = self.seconds, answered.reading
        self._note_reach(answered, ended_s)
        seen = Seen(
            due_s=due_s,
            sent_s=sent_s,
            ended_s=ended_s,
            firsts_s={name: at_s - self._began_s for name, at_s in reading.firsts_s.items()},
            failure=answered.failure,
            status=answered.status,
            tokens=reading.tokens,
            characters=reading.characters,
            pictures=reading.pictures,
            sound_s=reading.sound_s,
        )
        self.waiting_since_s.pop(number, None)
        self.tally.add(seen, reading.gaps_s, answered.message)

    def _note_reach(self, answered: Answered, at_s: float) -> None:
        """End the test if no connection to the hub was made for long."""
        if answered.failure != UNREACHABLE:
            self._unreachable_since_s = None
        elif self._unreachable_since_s is None:
            self._unreachable_since_s = at_s
        elif at_s - self._unreachable_since_s > _GONE_S:
            self.is_gone = True
            self._stop.set()

    @asynccontextmanager
    async def _metered(self) -> AsyncIterator[None]:
        """Measure how late the loop is to wake what is due: as late it sees what has come."""

        async def meter() -> None:
            while True:
                asleep_s = time.perf_counter()
                await asyncio.sleep(_METER_S)
                self._lags_s.append(max(0.0, time.perf_counter() - asleep_s - _METER_S))

        task = asyncio.create_task(meter())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _acquired(room: asyncio.Semaphore, timeout_s: float | None) -> bool:
    """Take a place; False if there is none within this time."""
    if not room.locked():
        return await room.acquire()
    try:
        async with asyncio.timeout(timeout_s):
            return await room.acquire()
    except TimeoutError:
        return False
