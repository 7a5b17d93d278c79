"""Streamed pieces per hub core, over HTTP and in Python: ``python -m tests.bench.tokens_per_core``.

A thousand streams at once through one stage of two echo replicas that step as a model does: every ``--step-s`` each
running request gets its next word, in the same step, whatever the hub has to do. So the rate is given, and what is
measured is the hub's processor time: between the moment at which all streams have begun and one before any ends, by
the kernel's own count of the hub's threads, divided by the pieces that its clients have read meanwhile. *Least* is that
of the cheapest two seconds of it: others on the machine empty its caches, which can double what a piece costs. *Whole*
is the same from before the first stream to behind the last, their begins and ends included. Then whole chats through
two stages. Clients are processes of their own.

With ``--servers 1 2`` hubs of so many API servers take turns over HTTP, and their processor time is that of all of them
together; *share* is that of the busiest. There are so many streams for each server: what a hub does without any piece,
and how many pieces it gets at once, is then the same.

With ``--vllm`` vLLM's own API server takes its turns in the same run, over a mock engine core that steps in the same
way: ``vllm_server_script.py`` says what of it runs.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any, Final
from urllib.parse import urlsplit

import uvloop

from tests.bench import report
from tests.bench.actors import Actor, now_s
from tests.bench.hub_overhead import Client
from tests.bench.omni_actor import OmniActor
from tests.support.hub import Hub
from tests.support.processes import wait_for

_DEPLOY: Final = """
model: echo-steps
stages:
  - {{stage_id: 0, engine: echo, engine_args: {{capacity: {capacity}, step_s: {step_s}}},
     runtime: {{num_replicas: 2}}, final_output: text}}
"""
_PAIR: Final = """
model: echo-two
stages:
  - {stage_id: 0, engine: echo, engine_args: {capacity: 64}, runtime: {num_replicas: 2}, final_output: text}
  - {stage_id: 1, engine: echo, engine_args: {capacity: 64}, runtime: {num_replicas: 2}, final_output: text}
"""
_THINKER: Final = Path(__file__).parents[2] / "stage_runtime" / "demo" / "thinker"
#: What marks a piece of a stream's text; a word of the echo engine holds no quote.
_PIECE: Final = b'"content":'
_END: Final = b"data: [DONE]"
_BEGIN_S: Final = 120.0
#: Seconds of a part of the measured time.
_PART_S: Final = 2.0


def servers_of(hub: Hub) -> tuple[int, ...]:
    """The processes of a hub's API servers."""
    return (hub.process.pid, *map(int, re.findall(r"api_server\.starting number=\d+ pid=(\d+)", hub.text)))


def serve(stack: ExitStack, folder: Path, deploy: str, servers: int) -> Hub:
    """A hub of so many API servers, once all of them serve."""
    (own := folder / f"servers-{servers}").mkdir()
    hub = Hub.of_yaml(own, deploy, "--api-server-count", str(servers))
    stack.callback(hub.stop)
    # The first is ready when the others listen, and each tells when it has its replicas.
    wait_for("all servers", lambda: hub.text.count("hub.ready") == servers, _BEGIN_S)
    return hub.wait_ready()


def way_of(servers: int) -> str:
    """How the tables call them."""
    return "HTTP" if servers == 1 else f"HTTP, {servers} servers"


def threads_s(*pids: int) -> dict[str, float]:
    """Processor time of each thread of these processes so far, by its id."""
    found: dict[str, float] = {}
    for task in (task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()):
        try:
            found[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
        except OSError:
            # It has just ended.
            continue
    return found


class _Reader(asyncio.Protocol):
    """One stream of server-sent events, counted and not parsed."""

    def __init__(self, client: HttpStreams, request: bytes) -> None:
        self._client = client
        self._request = request
        self._pieces = 0
        self._tail = b""

    def connection_made(self, transport: Any) -> None:
        """See asyncio."""
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        found = data.count(_PIECE)
        # Two of them: the first event may come with the answer's head alone.
        if self._pieces < 2 <= self._pieces + found:
            self._client.begun += 1
        self._pieces += found
        self._client.pieces += found
        self._tail = (self._tail + data)[-64:]

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._client.ended += 1
        self._client.whole += exc is None and _END in self._tail


class HttpStreams:
    """Clients over HTTP, in a process of their own; for an Actor."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._loop = uvloop.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.pieces = self.begun = self.ended = self.whole = 0

    def begin(self, count: int, prompt: str, fields: dict[str, Any]) -> None:
        """Ask so many at once."""
        self.pieces = self.begun = self.ended = self.whole = 0
        body = json.dumps({"messages": [{"role": "user", "content": prompt}], "stream": True, **fields}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._host}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        request = head.encode() + body

        async def connect_all() -> None:
            for number in range(count):
                await self._loop.create_connection(lambda: _Reader(self, request), self._host, self._port)
                if number % 20 == 19:
                    await asyncio.sleep(0.01)

        asyncio.run_coroutine_threadsafe(connect_all(), self._loop).result()

    def progress(self) -> tuple[int, int, int, int]:
        """Pieces, streams with more than one, streams that have ended, those of them that were whole."""
        return self.pieces, self.begun, self.ended, self.whole

    def shut(self) -> None:
        """Stop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)


class PythonStreams(OmniActor):
    """A hub in Python alone, and its callers; for an Actor. It spares the collector as docs/python.md advises."""

    pieces = begun = ended = whole = 0

    def __init__(self, endpoint: str, namespace: str, deploy: str) -> None:
        super().__init__(endpoint, namespace, deploy)
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 10, 10)

    def begin(self, count: int, prompt: str, _fields: dict[str, Any]) -> None:
        """Ask so many at once."""
        self.pieces = self.begun = self.ended = self.whole = 0
        self._call(self._begin_all(count, prompt))

    def progress(self) -> tuple[int, int, int, int]:
        """See HttpStreams."""
        return self.pieces, self.begun, self.ended, self.whole

    async def _begin_all(self, count: int, prompt: str) -> None:
        self._readers = []
        for number in range(count):
            self._readers.append(asyncio.create_task(self._read(prompt)))
            if number % 20 == 19:
                await asyncio.sleep(0.01)

    async def _read(self, prompt: str) -> None:
        pieces = 0
        async for output in self._omni.generate({"prompt": prompt}):
            if output.text:
                pieces += 1
                self.pieces += 1
                if pieces == 2:
                    self.begun += 1
            self.whole += output.is_summary
        self.ended += 1


def stream_row(
    way: str, pids: Sequence[int], asker: Actor, count: int, words: int, step_s: float, **fields: Any
) -> report.Row:
    """One round of streams."""
    before, began_s = threads_s(*pids), now_s()
    asker.call("begin", count, " ".join(["word"] * words), fields, timeout_s=_BEGIN_S)
    while asker.call("progress")[1] < count:
        if now_s() - began_s > _BEGIN_S:
            raise TimeoutError(f"{way}: {asker.call('progress')} after {_BEGIN_S:g} s")
        time.sleep(0.2)
    # What the oldest of them still has, but for a few steps.
    left_s = (words - 4) * step_s - (now_s() - began_s)
    if left_s < 5.0:
        raise ValueError(f"{way}: {left_s:.1f} s are left between the begins and the ends: more --words")
    first, pieces_before = threads_s(*pids), asker.call("progress")[0]
    from_s = now_s()
    parts: list[float] = []
    last, progress, took_s = first, (pieces_before, 0, 0, 0), 0.0
    while took_s < left_s - _PART_S:
        used_s, pieces_then = sum(last.values()), progress[0]
        time.sleep(_PART_S)
        last, progress = threads_s(*pids), asker.call("progress")
        took_s = now_s() - from_s
        parts.append(1e6 * (sum(last.values()) - used_s) / (progress[0] - pieces_then))
    if progress[2]:
        raise RuntimeError(f"{way}: {progress[2]} streams ended while they were measured")
    while (ended := asker.call("progress"))[2] < count:
        time.sleep(0.1)
    after = threads_s(*pids)
    if ended[3] < count:
        raise RuntimeError(f"{way}: {count - ended[3]} streams of {count} were cut")
    pieces = progress[0] - pieces_before
    threads = {name: 1e6 * (last[name] - first.get(name, 0.0)) / pieces for name in last}
    return {
        "way": way,
        "pieces_per_s": round(pieces / took_s),
        "us_per_piece": round(sum(threads.values()), 1),
        "loop_us": round(max(threads.values()), 1),
        "least_us": round(min(parts), 1),
        "whole_us": round(1e6 * (sum(after.values()) - sum(before.values())) / ended[0], 1),
    }


@contextmanager
def vllm_server(step_s: float) -> Iterator[tuple[int, str]]:
    """vLLM's API server over the mock engine core: its process and URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.bench.vllm_server_script", str(_THINKER), str(port), str(step_s)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"})
    url, until_s = f"http://127.0.0.1:{port}", now_s() + _BEGIN_S
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
        process.wait(30)


def streams(
    folder: Path, rounds: int, count: int, words: int, step_s: float, servers: Sequence[int], *, with_vllm: bool
) -> Iterator[report.Row]:
    """Streams over HTTP and in Python, through one hub each that have the same replicas."""
    deploy = _DEPLOY.format(capacity=count * max(servers), step_s=step_s)
    with ExitStack() as stack:
        hubs = [serve(stack, folder, deploy, each) for each in servers]
        ways: list[tuple[str, Sequence[int], Actor, int, dict[str, Any]]] = [
            (way_of(each), servers_of(hub), stack.enter_context(Actor(HttpStreams, hub.url)), count * each, {})
            for each, hub in zip(servers, hubs, strict=True)
        ]
        if len(hubs) == 1:
            python = stack.enter_context(Actor(PythonStreams, hubs[0].endpoint, hubs[0].namespace, deploy))
            ways.append(("AsyncOmni", [python.pid], python, count, {}))
        if with_vllm:
            pid, url = stack.enter_context(vllm_server(step_s))
            # Its model's context is short, and what is asked has no part in what the mock core says.
            short = [{"role": "user", "content": "word"}]
            asked = {"model": "mock", "max_tokens": words, "ignore_eos": True, "messages": short}
            ways.append(("vLLM's server", [pid], stack.enter_context(Actor(HttpStreams, url)), count, asked))
        for turn in range(rounds):
            for way, pids, asker, asked_count, fields in ways:
                yield {"round": turn, **stream_row(way, pids, asker, asked_count, words, step_s, **fields)}


def requests(folder: Path, rounds: int, count: int, at_once: int, servers: Sequence[int]) -> Iterator[report.Row]:
    """Whole chats through two stages, over HTTP connections that stay open."""
    with ExitStack() as stack:
        hubs = [serve(stack, folder, _PAIR, each) for each in servers]
        for hub in hubs:
            asyncio.run(_ask(hub.url, at_once, count // 4))
        for turn in range(rounds):
            for each, hub in zip(servers, hubs, strict=True):
                pids = servers_of(hub)
                before, began_s = [sum(threads_s(pid).values()) for pid in pids], now_s()
                asyncio.run(_ask(hub.url, at_once, count))
                took_s = now_s() - began_s
                used = [sum(threads_s(pid).values()) - had for pid, had in zip(pids, before, strict=True)]
                yield {
                    "round": turn,
                    "way": way_of(each),
                    "requests_per_s": round(count / took_s),
                    "us_per_request": round(1e6 * sum(used) / count),
                    "share": round(max(used) / sum(used), 2),
                }


async def _ask(url: str, at_once: int, count: int) -> None:
    clients = [Client(url) for _ in range(at_once)]
    for client in clients:
        await client.open()
    left = iter(range(count))

    async def keep_asking(client: Client) -> None:
        for _ in left:
            await client.ask()

    await asyncio.gather(*map(keep_asking, clients))
    for client in clients:
        client.close()


def main() -> None:
    """Serve, ask, print the tables, write them as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--words", type=int, default=150)
    parser.add_argument("--step-s", type=float, default=0.25)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--servers", type=int, nargs="+", default=[1], help="API servers of each hub")
    parser.add_argument("--vllm", action="store_true", help="vLLM's own API server, too; it must be installed")
    parser.add_argument("--only", choices=("streams", "requests"))
    parser.add_argument("--out", type=Path, help="path of the JSON file to write")
    given = parser.parse_args()
    results: report.Row = {"machine": report.machine()}
    parts: dict[str, Callable[[Path], Iterator[report.Row]]] = {
        "streams": lambda folder: streams(
            folder, given.rounds, given.streams, given.words, given.step_s, given.servers, with_vllm=given.vllm
        ),
        "requests": lambda folder: requests(folder, given.rounds, given.requests, given.at_once, given.servers),
    }
    for name, part in parts.items():
        if given.only in (None, name):
            with TemporaryDirectory() as folder:
                results[name] = list(part(Path(folder)))
            report.show(f"processor time of the hub: {name}", results[name])
    report.write(given.out, results)


if __name__ == "__main__":
    main()
