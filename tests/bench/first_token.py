"""Time to the first token, beside bare vLLM's own server: ``python -m tests.bench.first_token``.

One ``omni serve`` with one replica of the demo's thinker, and ``vllm serve`` of the same model with the same engine
arguments, both up from the first turn to the last. Clients in processes of their own ask one side and then the other
for the same streamed chats, over connections that stand before a turn begins, now the one first and now the other.

A turn has so many streams at once. *Burst* are the first of them, which all begin at the same moment; *joined* are
those that follow, each as soon as the one before it on its connection has ended, so that they join streams that run.
Answers have lengths of their own, so that they don't end together. From the moment before the request is written to the
one at which the first text of the answer has been read; *whole* is until the end of the answer.

A figure of a turn is the median of its streams. The result is the ratio of the turns that stand next to each other, its
median, and the interval that holds the true median with 95 % (``before_after.interval``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, Final
from urllib.parse import urlsplit

import uvloop

from omni_discovery.deploy.document import StageConfig
from stage_runtime.supervisor.environment import stage_environment
from tests.bench import report
from tests.bench.actors import Actor, now_s
from tests.bench.before_after import interval
from tests.support.hub import Hub

_THINKER: Final = Path(__file__).resolve().parents[2] / "stage_runtime" / "demo" / "thinker"
_ENGINE: Final[dict[str, Any]] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 64 << 20,
    "enforce_eager": True,
}
_STAGE: Final = StageConfig(stage_id=0, engine="vllm", model=str(_THINKER), engine_args=_ENGINE, final_output="text")
_NAME: Final = "thinker"
#: Ends the answer's body of an HTTP/1.1 connection that stays open.
_LAST_CHUNK: Final = b"\r\n0\r\n\r\n"
_HAS_TEXT: Final = re.compile(rb'"content": ?"[^"]')
_READY_S: Final = 300.0
_TURN_S: Final = 120.0

#: One request: its question and how many tokens its answer has.
Asked = tuple[str, int]
#: Until the first text, until the end (both in seconds), and the answer.
Answered = tuple[float, float, bytes]


class _Connection(asyncio.Protocol):
    """One connection that stays open: one request after the other, read and hardly parsed."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._parts: list[bytes] = []
        self._tail = b""
        self._first_s = 0.0
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: Any) -> None:
        """See asyncio."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self._parts.append(data)
        if self._done is not None and not self._parts[0].startswith(b"HTTP/1.1 200 "):
            self._done.set_exception(RuntimeError(f"refused: {b''.join(self._parts)[:600]!r}"))
            self._done = None
        if not self._first_s and _HAS_TEXT.search(b"".join(self._parts)):
            self._first_s = now_s()
        self._tail = (self._tail + data)[-len(_LAST_CHUNK) :]
        if self._done is not None and self._tail == _LAST_CHUNK:
            self._done.set_result(None)
            self._done = None

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        if self._done is not None:
            self._done.set_exception(ConnectionError(f"the answer breaks off: {b''.join(self._parts)[-300:]!r}"))

    def close(self) -> None:
        """Disconnect."""
        self._transport.close()

    async def ask(self, question: str, tokens: int) -> Answered:
        """One streamed chat."""
        fields = {"model": _NAME, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "stream": True}
        body = json.dumps({**fields, "messages": [{"role": "user", "content": question}]}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._host}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._parts, self._tail, self._first_s = [], b"", 0.0
        done = self._done = asyncio.get_running_loop().create_future()
        began_s = now_s()
        self._transport.write(head.encode() + body)
        await done
        ended_s = now_s()
        answer = b"".join(self._parts)
        if b" 200 " not in answer.partition(b"\r\n")[0] or not self._first_s:
            raise RuntimeError(answer[:600].decode())
        return self._first_s - began_s, ended_s - began_s, answer


class Asker:
    """A client of one server, in a process of its own; for an Actor."""

    def __init__(self, url: str) -> None:
        self._place = urlsplit(url)
        self._loop = uvloop.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def turn(self, asked: Sequence[Sequence[Asked]]) -> list[list[Answered]]:
        """Ask on each of new connections one list of requests, one after the other."""

        async def follow(connection: _Connection, requests: Sequence[Asked]) -> list[Answered]:
            return [await connection.ask(*each) for each in requests]

        async def ask_all() -> list[list[Answered]]:
            # Before anything is timed; servers close connections that nobody has used for some seconds.
            connections = [await self._connect() for _ in asked]
            try:
                return await asyncio.gather(*map(follow, connections, asked))
            finally:
                for connection in connections:
                    connection.close()

        return asyncio.run_coroutine_threadsafe(ask_all(), self._loop).result(_TURN_S)

    async def _connect(self) -> _Connection:
        host, port = self._place.hostname or "", self._place.port or 80
        return (await self._loop.create_connection(lambda: _Connection(self._place.netloc), host, port))[1]

    def shut(self) -> None:
        """Stop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)


def questions(turn: int, at_once: int, rounds: int, tokens: int) -> list[list[Asked]]:
    """What each connection asks in a turn: sums that no other turn asks in this order, answers of unequal lengths."""
    chance = random.Random(f"{turn} {at_once}")

    def one() -> Asked:
        question = f"What is {chance.randrange(100)} {chance.choice('+-')} {chance.randrange(100)}?"
        return question, chance.randint(tokens // 2, tokens + tokens // 2)

    return [[one() for _ in range(rounds)] for _ in range(at_once)]


def text_of(answer: bytes) -> str:
    """The text of a streamed answer."""
    events = [line[6:] for line in answer.splitlines() if line.startswith(b"data: {")]
    deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def processes_of(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    for each in found:
        for task in Path(f"/proc/{each}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def cpu_s(pids: Sequence[int]) -> float:
    """Processor time of these processes so far."""
    threads = [task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in threads) / 1e9


@contextmanager
def ours(folder: Path) -> Iterator[tuple[int, str]]:
    """``omni serve`` with one replica: its process and URL."""
    stage = {"stage_id": 0, "engine": "vllm", "model": str(_THINKER), "engine_args": _ENGINE, "final_output": "text"}
    document = {"model": _NAME, "stages": [{**stage, "runtime": {"num_replicas": 1, "devices": "cpu"}}]}
    hub = Hub.of_yaml(folder, json.dumps(document))
    try:
        hub.wait_ready(_READY_S)
        yield hub.process.pid, hub.url
    finally:
        hub.stop()


@contextmanager
def bare() -> Iterator[tuple[int, str]]:
    """``vllm serve``, its engine core in a process of its own as it comes: its process and URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in _ENGINE.items() if value is not True]
    flags += [f"--{name.replace('_', '-')}" for name, value in _ENGINE.items() if value is True]
    quiet = ["--disable-log-stats", "--disable-uvicorn-access-log"]
    command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", str(_THINKER)]
    command += [*flags, *quiet, "--host", "127.0.0.1", "--port", str(port), "--served-model-name", _NAME]
    environment = {**os.environ, **stage_environment(_STAGE, True)}
    # Only what has its engine in the process of its sockets wants it off.
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    url, until_s = f"http://127.0.0.1:{port}", now_s() + _READY_S
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                if process.poll() is not None or now_s() > until_s:
                    raise RuntimeError("vLLM's server did not come up; what it says is above") from None
                time.sleep(0.5)
        yield process.pid, url
    finally:
        process.terminate()
        process.wait(60)


class Side:
    """One server, and its clients."""

    def __init__(self, stack: ExitStack, pid: int, url: str) -> None:
        self._pids = processes_of(pid)
        self._asker = stack.enter_context(Actor(Asker, url))

    def turn(self, asked: Sequence[Sequence[Asked]]) -> tuple[report.Row, list[str]]:
        """Figures of one turn (milliseconds, tokens a second), and the texts of the answers."""
        before_s, began_s = cpu_s(self._pids), now_s()
        answered: list[list[Answered]] = self._asker.call("turn", asked, timeout_s=_TURN_S + 10)
        took_s, used_s = now_s() - began_s, cpu_s(self._pids) - before_s
        tokens = sum(count for requests in asked for _, count in requests)
        joined = [each for answers in answered for each in answers[1:]]
        figures = {
            "burst": 1000 * statistics.median(answers[0][0] for answers in answered),
            "joined": 1000 * statistics.median(each[0] for each in joined),
            "joined p95": 1000 * report.percentile([each[0] for each in joined], 0.95),
            "whole": 1000 * statistics.median(each[1] for each in joined),
            "us of processor a token": 1e6 * used_s / tokens,
            "tokens a second": tokens / took_s,
        }
        return figures, [text_of(each[2]) for answers in answered for each in answers]


def measure(sides: Sequence[Side], at_once: int, pairs: int, rounds: int, tokens: int) -> list[report.Row]:
    """One row for each figure: ours and bare vLLM's medians, their ratio, and its interval."""
    found: list[list[report.Row]] = [[], []]
    for turn in range(-2, pairs):
        asked = questions(turn, at_once, rounds, tokens)
        texts: dict[int, list[str]] = {}
        for place in (0, 1) if turn % 2 else (1, 0):
            figures, texts[place] = sides[place].turn(asked)
            if turn >= 0:
                found[place].append(figures)
        # Sums in another order may turn a tie between two tokens over; nearly all answers are the same.
        same = sum(one == other for one, other in zip(texts[0], texts[1], strict=True))
        if same < 0.9 * len(texts[0]):
            raise RuntimeError(f"only {same} of {len(texts[0])} answers are the same")
    return [_row(at_once, name, *found) for name in found[0][0]]


def _row(at_once: int, name: str, mine: Sequence[report.Row], theirs: Sequence[report.Row]) -> report.Row:
    ratios = [one[name] / other[name] for one, other in zip(mine, theirs, strict=True)]
    low, high = interval(ratios)
    return {
        "at_once": at_once,
        "figure": name,
        "ours": round(statistics.median(each[name] for each in mine), 2),
        "bare_vllm": round(statistics.median(each[name] for each in theirs), 2),
        "ratio": round(statistics.median(ratios), 3),
        "interval": f"{low:.3f} to {high:.3f}",
        "pairs": len(ratios),
    }


def main() -> None:
    """Serve both, ask in turns, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at-once", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--pairs", type=int, default=21, help="pairs of turns at each number of streams (at least 9)")
    parser.add_argument("--rounds", type=int, default=4, help="requests on each connection in a turn (default 4)")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer on average (default 32)")
    parser.add_argument("--out", type=Path, help="path of the JSON file to write")
    given = parser.parse_args()
    # Whoever ends it ends the processes that it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    results: report.Row = {"machine": report.machine(), "rows": []}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        theirs = stack.enter_context(bare())
        mine = stack.enter_context(ours(Path(folder)))
        sides = [Side(stack, *each) for each in (mine, theirs)]
        for at_once in given.at_once:
            rows = measure(sides, at_once, max(9, given.pairs), given.rounds, given.tokens)
            report.show(f"{at_once} streams at once, ours beside bare vLLM", rows)
            results["rows"] += rows
    results["machine"]["load_average_at_the_end"] = report.machine()["load_average"]
    report.write(given.out, results)


if __name__ == "__main__":
    main()
