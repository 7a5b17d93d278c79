"""Hub to replica and back over the echo engine, beside a bare pair of sockets: ``python -m tests.bench.data_plane``.

*bare* is a DEALER here and a ROUTER in another process, both driven by file descriptor on uvloop, one msgpack message
each way; *bare, 3 replies* answers with as many messages as a replica does. *omni-discovery* is the hub's StageClient
here, and a replica's server, sessions, credits and engine loop in another process: a Submit there, Accepted, one Chunk
and StageDone back, on two sockets. All send a prompt and get it back, with and without CURVE. They take turns several
times; the medians of the rounds are the result.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import uvloop

from omni_discovery.curve import KeyPair
from tests.bench import report
from tests.bench.actors import Actor, now_s
from tests.bench.data_plane_bare import BareClient, BareServer
from tests.bench.data_plane_ours import EchoReplica, OurClient, info_of

AT_ONCE: Final = 64
_CAPACITY: Final = 2 * AT_ONCE
_OURS: Final = "omni-discovery"

Client = BareClient | OurClient
Connect = Callable[[Callable[[int], Any]], Client]


async def latencies_s(connect: Connect, prompt: str, count: int) -> list[float]:
    """The round trips of requests that go one after the other."""
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[float] = loop.create_future()
    client = connect(lambda _: answered.set_result(now_s()))
    await client.ready()
    found = []
    for number in range(count + count // 10):
        answered = loop.create_future()
        began_s = now_s()
        client.ask(number, prompt)
        found.append(await answered - began_s)
    client.close()
    return found[count // 10 :]


async def rate(connect: Connect, prompt: str, count: int) -> float:
    """Requests per second with ``AT_ONCE`` of them out at any time."""
    over = asyncio.Event()
    asked = answered = 0

    def ask() -> None:
        nonlocal asked
        client.ask(asked, prompt)
        asked += 1

    def hear(_: int) -> None:
        nonlocal answered
        answered += 1
        if asked < count:
            ask()
        elif answered == count:
            over.set()

    client = connect(hear)
    await client.ready()
    began_s = now_s()
    for _ in range(AT_ONCE):
        ask()
    await asyncio.wait_for(over.wait(), 120.0)
    took_s = now_s() - began_s
    client.close()
    return count / took_s


class Systems:
    """The servers, each in a process of its own, and how to connect to them."""

    def __init__(self, stack: ExitStack) -> None:
        mine, theirs = KeyPair.generate(), KeyPair.generate()
        self.actors: dict[tuple[str, bool], Actor] = {}
        self.connects: dict[tuple[str, bool], Connect] = {}
        for is_curve in (False, True):
            keys, own = (theirs, mine) if is_curve else (None, None)
            ours = stack.enter_context(Actor(EchoReplica, keys, mine.public, _CAPACITY))
            self.actors[_OURS, is_curve] = ours
            for name, replies in (("bare", 1), ("bare, 3 replies", 3)):
                bare = self.actors[name, is_curve] = stack.enter_context(Actor(BareServer, keys, replies))
                address = bare.call("address")
                self.connects[name, is_curve] = _bare(address, (mine, theirs.public) if is_curve else None)
            self.connects[_OURS, is_curve] = _ours(info_of(ours.call("ports"), keys, _CAPACITY), own)


def _bare(address: str, keys: tuple[KeyPair, str] | None) -> Connect:
    return lambda on_answer: BareClient(address, keys, on_answer)


def _ours(info: Any, keys: KeyPair | None) -> Connect:
    return lambda on_answer: OurClient(info, keys, on_answer)


def measure(rounds: int, requests: int, sizes: list[int]) -> list[report.Row]:
    """One row for each system, encryption and size: the medians of all rounds."""
    found: dict[tuple[int, bool, str], list[report.Row]] = {}
    with ExitStack() as stack:
        systems = Systems(stack)
        for _ in range(rounds):
            for size in sizes:
                for (name, is_curve), connect in systems.connects.items():
                    row = _turn(connect, systems.actors[name, is_curve], "x" * size, requests)
                    found.setdefault((size, is_curve, name), []).append(row)
    return [
        {
            "bytes": size,
            "curve": "yes" if is_curve else "no",
            "system": name,
            **{column: round(statistics.median(row[column] for row in rows), 1) for column in rows[0]},
        }
        for (size, is_curve, name), rows in sorted(found.items())
    ]


def _turn(connect: Connect, server: Actor, prompt: str, requests: int) -> report.Row:
    alone_s = uvloop.run(latencies_s(connect, prompt, requests))
    before_s, own_before_s = server.cpu_s(), time.process_time()
    per_s = uvloop.run(rate(connect, prompt, 4 * requests))
    return {
        "p50_us": 1e6 * report.percentile(alone_s, 0.5),
        "p99_us": 1e6 * report.percentile(alone_s, 0.99),
        "requests_per_s": per_s,
        "hub_cpu_us": 1e6 * (time.process_time() - own_before_s) / (4 * requests),
        "replica_cpu_us": 1e6 * (server.cpu_s() - before_s) / (4 * requests),
    }


def ratios(rows: list[report.Row]) -> list[report.Row]:
    """Ours to bare, and what CURVE takes from the rate of each."""
    by = {(row["bytes"], row["curve"], row["system"]): row for row in rows}
    lines: list[report.Row] = []
    for size in sorted({row["bytes"] for row in rows}):
        for curve in ("no", "yes"):
            bare, ours = by[size, curve, "bare"], by[size, curve, _OURS]
            line: report.Row = {
                "bytes": size,
                "curve": curve,
                "p50_to_bare": report.ratio(ours["p50_us"], bare["p50_us"]),
                "p99_to_bare": report.ratio(ours["p99_us"], bare["p99_us"]),
                "rate_to_bare": report.ratio(ours["requests_per_s"], bare["requests_per_s"]),
            }
            if curve == "yes":
                for name in ("bare", _OURS):
                    plain, secured = by[size, "no", name], by[size, "yes", name]
                    left = secured["requests_per_s"] / plain["requests_per_s"]
                    line[f"rate_lost_{name}"] = f"{100 * (1 - left):.0f} %"
                    line[f"p50_grows_{name}"] = report.ratio(secured["p50_us"], plain["p50_us"])
            lines.append(line)
    return sorted(lines, key=lambda line: (line["curve"] == "no", line["bytes"]))


def main() -> None:
    """Measure, print two tables, write them as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--requests", type=int, default=3000, help="of each turn one at a time; four times as many at once"
    )
    parser.add_argument("--sizes", nargs="+", type=int, default=[256, 4096], help="bytes of the prompt")
    parser.add_argument("--out", type=Path, help="path of the JSON file to write")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    results: report.Row = {"machine": report.machine()}
    results["data_plane"] = measure(arguments.rounds, arguments.requests, arguments.sizes)
    results["ratios"] = ratios(results["data_plane"])
    report.show(f"hub to replica and back; requests per second with {AT_ONCE} at once", results["data_plane"])
    report.show("compared", results["ratios"])
    results["machine"]["load_average_at_the_end"] = report.machine()["load_average"]
    report.write(arguments.out, results)


if __name__ == "__main__":
    main()
