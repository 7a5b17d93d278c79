"""``python -m tests.fault.load``: clients that ask for streams until SIGTERM, and note what each of them saw.

They do what docs/http-api.md tells clients: one whose answer breaks asks again, and is given the rest. The right
answer of each request is known beforehand, drawn numbers included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Final

import msgspec

#: Words of an answer. With the deploy document's pauses, a stream takes 1.2 s.
WORDS: Final = 15
#: How long one waits before each further try; then it gives up.
PAUSES_S: Final = (0.2, 1.0, 2.0, 4.0, 8.0)
#: A client that hears nothing for so long takes its connection for dead. More than a request may wait that lost its
#: replica before its first word, where one other is left (docs/decisions/0013).
SILENCE_S: Final = 30.0
#: What a 503 says that tells clients to come later since there are too many of them (docs/http-api.md).
BOUNDS: Final = ('"too_many_connections"', '"too_many_bodies"')
#: One that is told to come later so often gives up.
REFUSALS: Final = 60


class Load(msgspec.Struct, frozen=True):
    """How much is asked: ``rate`` requests per second, whatever comes back, or ``clients`` ask one after the other."""

    rate: float = 0.0
    clients: int = 0
    #: Whether there is more than the slots can do, so that 429 is a right answer.
    is_too_much: bool = False
    #: How long a stream that has lost its replica may wait for a slot, where half of them are left for all clients.
    turn_s: float = 0.0


#: Two stages of twelve slots each: ten streams a second at most.
LOADS: Final = {
    "idle": Load(rate=0.5),
    "steady": Load(rate=4.0),
    "overload": Load(clients=36, is_too_much=True, turn_s=8.0),
}


class Seen(msgspec.Struct):
    """What the client of one request saw; moments are on the clock that processes share."""

    number: int
    asked_s: float
    #: From asking to the first word, and the longest time between two words.
    first_after_s: float | None = None
    stall_s: float = 0.0
    #: When the longest of these began.
    stalled_at_s: float = 0.0
    ended_s: float = 0.0
    #: How often it had to ask again since its answer broke, why, and how often it was told to come later.
    broken: int = 0
    causes: list[str] = msgspec.field(default_factory=list)
    refused: int = 0
    #: Why there is no right answer; empty if there is.
    error: str = ""


class Report(msgspec.Struct):
    """All that the clients saw."""

    requests: list[Seen]
    #: The longest that this process itself was held up: no stall below it means anything.
    own_lag_s: float


class BrokenError(Exception):
    """The answer broke; to ask again may help."""


class RefusedError(Exception):
    """The hub wants to be asked later."""

    def __init__(self, after_s: float) -> None:
        super().__init__(f"refused for {after_s:g} s")
        self.after_s = after_s


class WrongError(Exception):
    """The answer is wrong, or is a refusal that asking again does not change."""


def prompt_of(number: int) -> str:
    """The words of a request, like those of no other."""
    return " ".join(f"r{number}w{word}" for word in range(WORDS))


def answer_of(number: int) -> str:
    """What the two echo stages make of it: the second draws a number behind each word, from the request's seed."""
    dice = Random(number)
    return " ".join(f"{word}~{dice.randrange(1000)}" for word in prompt_of(number).split())


class _Answer:
    """What one client has of its answer, over all its tries."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._text = ""
        self._last_s = seen.asked_s
        #: What the hub wants to hear if it is asked for the rest.
        self.place = "new"

    def add(self, piece: str, place: str) -> None:
        """Note a piece, and when it came."""
        seen, now_s = self._seen, time.monotonic()
        if not self._text:
            seen.first_after_s = now_s - seen.asked_s
        elif now_s - self._last_s > seen.stall_s:
            seen.stall_s, seen.stalled_at_s = now_s - self._last_s, self._last_s
        self._last_s, self.place = now_s, place
        self._text += piece

    def check(self) -> None:
        """Raise WrongError unless it is the right answer."""
        if self._text.strip() != answer_of(self._seen.number):
            raise WrongError(f"wrong answer {self._text!r}, asked {prompt_of(self._seen.number)!r}")


class Clients:
    """Asks ``host:port`` as ``load`` says, until it is told to stop."""

    def __init__(self, host: str, port: int, load: Load) -> None:
        self._host, self._port, self._load = host, port, load
        self._stop = asyncio.Event()
        self._number = 0
        self._lag_s = 0.0
        self.seen: list[Seen] = []

    def stop(self) -> None:
        """Ask nothing new."""
        self._stop.set()

    async def run(self) -> Report:
        """Ask; return when all that was asked has ended."""
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self._measure_lag())
            async with asyncio.TaskGroup() as asking:
                if self._load.clients:
                    for _ in range(self._load.clients):
                        asking.create_task(self._keep_asking())
                else:
                    await self._ask_at_rate(asking)
            watch.cancel()
        return Report(self.seen, self._lag_s)

    async def _ask_at_rate(self, group: asyncio.TaskGroup) -> None:
        began_s = time.monotonic()
        while not self._stop.is_set():
            group.create_task(self._ask())
            due_s = began_s + len(self.seen) / self._load.rate
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due_s - time.monotonic())):
                    await self._stop.wait()

    async def _keep_asking(self) -> None:
        while not self._stop.is_set():
            await self._ask()

    async def _measure_lag(self) -> None:
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(0.02)
            self._lag_s = max(self._lag_s, time.monotonic() - before_s - 0.02)

    async def _ask(self) -> None:
        self._number += 1
        seen = Seen(self._number, time.monotonic())
        self.seen.append(seen)
        answer, pauses = _Answer(seen), iter(PAUSES_S)
        while True:
            try:
                async for piece, place in self._stream(seen.number, answer.place):
                    answer.add(piece, place)
                answer.check()
                break
            except RefusedError as error:
                seen.refused += 1
                if seen.refused > REFUSALS:
                    seen.error = f"told to come later {seen.refused} times"
                    break
                await asyncio.sleep(error.after_s)
            except (BrokenError, OSError, EOFError, TimeoutError) as error:
                seen.broken += 1
                seen.causes.append(f"{type(error).__name__}: {error}"[:200])
                pause_s = next(pauses, None)
                if pause_s is None:
                    seen.error = f"asked {seen.broken} times: {seen.causes[-1]}"
                    break
                await asyncio.sleep(pause_s)
            except WrongError as error:
                seen.error = str(error)
                break
        seen.ended_s = time.monotonic()

    async def _stream(self, number: int, place: str) -> AsyncIterator[tuple[str, str]]:
        """The pieces of an answer behind ``place``, each with the place behind it."""
        asked = {"messages": [{"role": "user", "content": prompt_of(number)}], "seed": number, "stream": True}
        body = json.dumps(asked).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._host}\r\nConnection: close\r\n"
            f"x-omni-resume: {place}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        async with asyncio.timeout(SILENCE_S):
            reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(head.encode() + body)
            async with asyncio.timeout(SILENCE_S):
                headers = (await reader.readuntil(b"\r\n\r\n")).decode()
                status = int(headers.split()[1])
                if status != 200:
                    raise _refusal(status, headers, (await reader.read()).decode(errors="replace"))
            async for line in _lines(reader):
                if line == "data: [DONE]":
                    return
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise BrokenError(line[-200:])
                for choice in event["choices"]:
                    if piece := choice["delta"].get("content"):
                        yield piece, event["resume"]
            raise BrokenError("the stream ended before its end")
        finally:
            writer.close()


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    """The lines that carry an event; those with sizes of chunks are passed over."""
    while True:
        async with asyncio.timeout(SILENCE_S):
            line = (await reader.readline()).decode()
        if not line:
            return
        if line.startswith("data: "):
            yield line.rstrip()


def _refusal(status: int, headers: str, text: str) -> Exception:
    # A 503 for want of a replica or a hub is a broken answer; one for a bound of the hub's is a refusal.
    if status in {409, 429} or (status == 503 and any(code in text for code in BOUNDS)):
        found = [line.partition(":")[2] for line in headers.splitlines() if line.lower().startswith("retry-after:")]
        if found:
            return RefusedError(float(found[0]))
    if status >= 500:
        return BrokenError(f"{status} {text[-150:]}")
    return WrongError(f"{status} {text[-150:]}")


async def run(host: str, port: int, load: Load, out: Path, on_stop: Callable[[Callable[[], None]], None]) -> None:
    """Ask until told to stop, and write the report."""
    clients = Clients(host, port, load)
    on_stop(clients.stop)
    report = await clients.run()
    await asyncio.to_thread(out.write_bytes, msgspec.json.encode(report))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--load", choices=sorted(LOADS), required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()

    async def until_told() -> None:
        loop = asyncio.get_running_loop()
        await run(
            given.host,
            given.port,
            LOADS[given.load],
            given.out,
            lambda stop: loop.add_signal_handler(signal.SIGTERM, stop),
        )

    asyncio.run(until_told())


if __name__ == "__main__":
    main()
