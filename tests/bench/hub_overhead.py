"""The hub's own time per request, over the echo engine: ``python -m tests.bench.hub_overhead``.

A real ``omni serve`` with two echo stages of two replicas each, embedded etcd and CURVE on, all on this machine. The
hub itself says in each answer's ``Server-Timing`` header how long it had the request: ``hub_in`` from the HTTP
request's arrival to the send to stage 0, ``hub_out`` from the last stage's result to the HTTP response. Requests go
over connections that stay open, one at a time and several at a time; the whole round trip as the client sees it and
the rate are shown beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from urllib.parse import urlsplit

from tests.bench import report
from tests.bench.actors import now_s
from tests.support.hub import Hub

_DEPLOY: Final = """
model: echo-two
stages:
  - {stage_id: 0, engine: echo, engine_args: {capacity: 32}, runtime: {num_replicas: 2}, final_output: none}
  - {stage_id: 1, engine: echo, engine_args: {capacity: 32}, runtime: {num_replicas: 2}, final_output: text}
"""
_BODY: Final = json.dumps({"messages": [{"role": "user", "content": "twelve and thirty"}]}).encode()


class Client:
    """One HTTP/1.1 connection that stays open, as thin as can be: it shares the machine with what is measured."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(_BODY)}\r\n\r\n"
        )
        self._request = head.encode() + _BODY

    async def open(self) -> None:
        """Connect."""
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)

    async def ask(self) -> dict[str, float]:
        """Send one request; the timings of its answer in seconds, ``round_trip`` among them."""
        began_s = now_s()
        self._writer.write(self._request)
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head.split("\r\n"))}
        body = await self._reader.readexactly(int(headers["content-length"]))
        took_s = now_s() - began_s
        if " 200 " not in head.partition("\r\n")[0]:
            raise RuntimeError(f"{head}{body.decode()}")
        timings = (part.strip().partition(";dur=") for part in headers["server-timing"].split(","))
        return {"round_trip": took_s, **{name: float(milliseconds) / 1000 for name, _, milliseconds in timings}}

    def close(self) -> None:
        """Disconnect."""
        self._writer.close()


async def _ask_all(clients: list[Client], count: int) -> list[dict[str, float]]:
    left = iter(range(count))

    async def keep_asking(client: Client) -> list[dict[str, float]]:
        return [await client.ask() for _ in left]

    answers = await asyncio.gather(*(keep_asking(client) for client in clients))
    return [answer for some in answers for answer in some]


async def _measure(url: str, at_once: int, count: int, warm_up: int) -> report.Row:
    clients = [Client(url) for _ in range(at_once)]
    for client in clients:
        await client.open()
    await _ask_all(clients, warm_up)
    began_s = now_s()
    answers = await _ask_all(clients, count)
    took_s = now_s() - began_s
    for client in clients:
        client.close()
    hub_s = [answer["hub_in"] + answer["hub_out"] for answer in answers]
    columns = {
        "hub_in": [answer["hub_in"] for answer in answers],
        "hub_out": [answer["hub_out"] for answer in answers],
        "hub": hub_s,
        "round_trip": [answer["round_trip"] for answer in answers],
    }
    row: report.Row = {"at_once": at_once, "requests": len(answers), "requests_per_s": round(len(answers) / took_s)}
    for name, samples_s in columns.items():
        spread = report.spread_ms(samples_s)
        row |= {f"{name}_p50_ms": spread["p50_ms"], f"{name}_p99_ms": spread["p99_ms"]}
    return row


def main() -> None:
    """Serve, ask, print the table, write it as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--warm-up", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--out", type=Path, help="path of the JSON file to write")
    arguments = parser.parse_args()
    results: report.Row = {"machine": report.machine(), "hub": []}
    with TemporaryDirectory() as folder:
        hub = Hub.of_yaml(Path(folder), _DEPLOY)
        try:
            hub.wait_ready()
            for turn in range(arguments.rounds):
                for at_once in arguments.at_once:
                    row = asyncio.run(_measure(hub.url, at_once, arguments.requests, arguments.warm_up))
                    results["hub"].append({"round": turn + 1, **row})
        finally:
            hub.stop()
    report.show("the hub's own time per request, two echo stages", results["hub"])
    results["machine"]["load_average_at_the_end"] = report.machine()["load_average"]
    report.write(arguments.out, results)


if __name__ == "__main__":
    main()
