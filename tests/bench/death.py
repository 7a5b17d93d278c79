"""A replica dies: how long the hub still picks it, and what requests feel: ``python -m tests.bench.death``.

A hub (AsyncOmni, encryption on, no registry, so nothing but the data plane tells) keeps several requests going over
replicas in processes of their own. One of these gets SIGKILL, or SIGSTOP and later SIGCONT. ``last_pick`` is from the
signal to the last pick of that replica, 0 if there was none; ``closed`` to the moment at which a bare TCP connection to
it saw its end, which nobody can know before. ``longest`` is the slowest of the requests that were under
way or came in then, ``longest_new`` of those alone that came in after the signal, and all their errors are counted. A
process that holds a gigabyte dies slowly: the kernel frees its memory before it closes its sockets.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import random
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import uvloop

from hub.async_omni import AsyncOmni
from hub.config import HubConfig
from hub.pool.core import Pool
from omni_discovery.curve import KeyPair
from omni_discovery.deploy.document import parse_deploy
from omni_discovery.view.table import Delta, View
from tests.bench import report
from tests.bench.actors import now_s
from tests.bench.data_plane_ours import HUB_ID
from tests.bench.death_replica import MortalReplica

_DEPLOY: Final = "stages: [{stage_id: 0, engine: echo, final_output: text}]"
_AT_ONCE: Final = 4
_SETTLE_S: Final = 0.05
#: What is looked at after a signal.
_KILL_WINDOW_S: Final = 0.4


@dataclass(slots=True)
class Watch:
    """What the pool does, by input address of the replica."""

    last_pick_s: dict[str, float] = field(default_factory=dict)
    session_down_s: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Look at all pools of this process."""
        pick, session_down = Pool.pick, Pool.session_down

        def picked(pool: Pool, *arguments: Any, **named: Any) -> Any:
            found = pick(pool, *arguments, **named)
            if found is not None:
                self.last_pick_s[found.input_addr] = now_s()
            return found

        def went_down(pool: Pool, addr: str) -> None:
            self.session_down_s.setdefault(addr, now_s())
            session_down(pool, addr)

        with patch.object(Pool, "pick", picked), patch.object(Pool, "session_down", went_down):
            yield


class Witness:
    """A bare TCP connection to the same replica, in a thread: when the kernel has closed the other end."""

    def __init__(self, addr: str) -> None:
        host, _, port = addr.removeprefix("tcp://").rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=5.0)
        self._socket.settimeout(None)
        #: Not a number before that.
        self.closed_s = float("nan")
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while self._socket.recv(4096):
                pass
        self.closed_s = now_s()
        self._socket.close()


class Traffic:
    """Several requests at any time, each as soon as the one before has ended."""

    def __init__(self, omni: AsyncOmni) -> None:
        self._omni = omni
        #: When each began and ended, and how.
        self.done: list[tuple[float, float, str]] = []
        self._under_way: dict[int, float] = {}
        self._tasks = [asyncio.create_task(self._keep_asking(number)) for number in range(_AT_ONCE)]

    async def _keep_asking(self, number: int) -> None:
        while True:
            began_s = self._under_way[number] = now_s()
            try:
                text = "".join([output.text async for output in self._omni.generate({"prompt": "hello"})])
                outcome = "" if text == "hello" else f"wrong: {text!r}"
            except Exception as error:  # noqa: BLE001 - whatever a client sees is what is counted
                outcome = f"{type(error).__name__}: {error}"
            self.done.append((began_s, now_s(), outcome))

    async def all_since(self, moment_s: float) -> list[tuple[float, float, str]]:
        """Those that ended since then, once all that are under way now have."""
        now = now_s()
        async with asyncio.timeout(60.0):
            while min(self._under_way.values()) < now:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        found = [each for each in self.done if each[1] >= moment_s]
        self.done.clear()
        return found

    def stop(self) -> None:
        """No more."""
        for task in self._tasks:
            task.cancel()


class Stage:
    """The hub and its replicas."""

    def __init__(self, replicas: int, held_bytes: int) -> None:
        self._keys = KeyPair.generate()
        self.omni = AsyncOmni(parse_deploy(_DEPLOY, "bench"), HUB_ID, self._keys, HubConfig())
        self._held_bytes = held_bytes
        self.replicas = [self._new() for _ in range(replicas)]
        self._revision = 0

    def _new(self) -> MortalReplica:
        return MortalReplica(self._keys.public, self._held_bytes)

    async def show(self, delta: Delta) -> None:
        """The registry lists what lives; wait until all of it can be picked."""
        self._revision += 1
        listed = {(0, each.info.replica_id): each.info for each in self.replicas}
        self.omni.apply_view(View(replicas=listed, revision=self._revision), delta)
        async with asyncio.timeout(10.0):
            while self.omni.stage_status()[0].pickable < len(self.replicas):  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def replace(self, dead: MortalReplica) -> None:
        """Another takes the place of one that was killed."""
        spare = self._new()
        dead.bury()
        self.replicas[self.replicas.index(dead)] = spare
        await self.show(Delta(removed=(dead.info,), added=(spare.info,)))

    async def close(self) -> None:
        """End all."""
        await self.omni.close()
        for each in self.replicas:
            each.bury()


async def kills(count: int, replicas: int, held_bytes: int) -> list[report.Row]:
    """Kill one so many times; a row for each."""
    rows, watch, stage = [], Watch(), Stage(replicas, held_bytes)
    with watch.on():
        await stage.omni.start()
        await stage.show(Delta(added=tuple(each.info for each in stage.replicas)))
        traffic = Traffic(stage.omni)
        for _ in range(count):
            # Not in step with the requests.
            await asyncio.sleep(_SETTLE_S * (1 + random.random()))
            victim = random.choice(stage.replicas)
            witness = Witness(victim.info.input_addr)
            await asyncio.sleep(_SETTLE_S)
            addr, at_s = victim.info.input_addr, now_s()
            victim.signal(signal.SIGKILL)
            await asyncio.sleep(_KILL_WINDOW_S + held_bytes / 2e9)
            row = _row(watch, addr, at_s, await traffic.all_since(at_s))
            rows.append({"closed": witness.closed_s - at_s, **row})
            await stage.replace(victim)
        traffic.stop()
        await stage.close()
    return rows


async def stops(count: int, replicas: int, stopped_s: float) -> list[report.Row]:
    """Stop one and let it go on, so many times; a row for each."""
    rows, watch, stage = [], Watch(), Stage(replicas, 0)
    with watch.on():
        await stage.omni.start()
        await stage.show(Delta(added=tuple(each.info for each in stage.replicas)))
        traffic = Traffic(stage.omni)
        for _ in range(count):
            await asyncio.sleep(_SETTLE_S * (1 + random.random()))
            victim = random.choice(stage.replicas)
            addr, at_s = victim.info.input_addr, now_s()
            watch.session_down_s.clear()
            victim.signal(signal.SIGSTOP)
            await asyncio.sleep(stopped_s)
            row = _row(watch, addr, at_s, await traffic.all_since(at_s))
            again_s = now_s()
            victim.signal(signal.SIGCONT)
            async with asyncio.timeout(30.0):
                while watch.last_pick_s[addr] < again_s:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            rows.append({**row, "picked_again": watch.last_pick_s[addr] - again_s})
        traffic.stop()
        await stage.close()
    return rows


def _row(watch: Watch, addr: str, at_s: float, done: list[tuple[float, float, str]]) -> report.Row:
    return {
        "last_pick": max(0.0, watch.last_pick_s.get(addr, 0.0) - at_s),
        "session_down": watch.session_down_s.get(addr, float("nan")) - at_s,
        # What a replica has accepted waits for its sockets to close; what it has not is sent to another one.
        "longest": max(ended_s - began_s for began_s, ended_s, _ in done),
        "longest_new": max((ended_s - began_s for began_s, ended_s, _ in done if began_s >= at_s), default=0.0),
        "errors": [outcome for *_, outcome in done if outcome],
    }


def _summary(what: str, replicas: int, rows: list[report.Row]) -> report.Row:
    line: report.Row = {"event": what, "replicas": replicas, "times": len(rows)}
    for name in ("closed", "last_pick", "session_down", "longest", "longest_new", "picked_again"):
        if name in rows[0]:
            values_s = [row[name] for row in rows]
            line[f"{name}_p50_/_p99_ms"] = " / ".join(
                f"{1000 * report.percentile(values_s, share):.1f}" for share in (0.5, 0.99)
            )
    errors = [error for row in rows for error in row["errors"]]
    return {**line, "errors": len(errors), "example": errors[0] if errors else ""}


def main() -> None:
    """Kill and stop, print a table, write it as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=40, help="of small processes, with each number of replicas")
    parser.add_argument("--replicas", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument("--big-kills", type=int, default=10, help="of processes that hold --big-bytes")
    parser.add_argument("--big-bytes", type=int, default=1 << 30)
    parser.add_argument("--stops", type=int, default=4)
    parser.add_argument("--stopped-s", type=float, default=6.0)
    parser.add_argument("--out", type=Path, help="path of the JSON file to write")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    results: report.Row = {"machine": report.machine(), "death": []}
    every: list[report.Row] = []
    for replicas in arguments.replicas:
        rows = uvloop.run(kills(arguments.kills, replicas, 0))
        results["death"].append(_summary("SIGKILL, small", replicas, rows))
        every += rows
    if every:
        results["death"].append(_summary("SIGKILL, small, all", 0, every))
    if arguments.big_kills:
        rows = uvloop.run(kills(arguments.big_kills, 2, arguments.big_bytes))
        results["death"].append(_summary(f"SIGKILL, holds {arguments.big_bytes / 2**30:g} GiB", 2, rows))
    if arguments.stops:
        rows = uvloop.run(stops(arguments.stops, 3, arguments.stopped_s))
        results["death"].append(_summary("SIGSTOP", 3, rows))
    report.show("from the signal on", results["death"])
    results["machine"]["load_average_at_the_end"] = report.machine()["load_average"]
    report.write(arguments.out, results)


if __name__ == "__main__":
    main()
