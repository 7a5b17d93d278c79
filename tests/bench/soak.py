"""Replicas killed under load, again and again: ``python -m tests.bench.soak``.

A real hub with an embedded etcd and encryption on, and one supervisor with four echo replicas, each a process. Every
second one replica that is up gets SIGKILL, unless half of them are starting. Meanwhile a client asks over HTTP at a
steady rate, half of it for streams. Any answer that is not exactly the prompt, and any status but 200, is an error, and
there must be none.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from omni_discovery.clients import OmniCoordClientForHub
from tests.bench import report
from tests.bench.soak_client import SteadyClient
from tests.support.hub import Hub
from tests.support.processes import wait_for

_WORDS: Final = 5
_TTL_S: Final = 5.0
#: Each request takes about 50 ms, so a kill finds some in every phase.
_DEPLOY: Final = """
model: echo
stages:
  - {stage_id: 0, engine: echo, engine_args: {capacity: 64, delay_s: 0.01}, final_output: text}
"""
_COUNTED: Final = re.compile(r"^omni_hub_(retries|continuations|session_losses)_total\{.*\} ([0-9.]+)", re.MULTILINE)


class Victims:
    """A supervisor, its replicas, and what kills them."""

    def __init__(self, hub: Hub, replicas: int) -> None:
        self._log = (hub.folder / "replicas.log").open("wb")
        self._supervisor = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.bench.patient_supervisor", "--stage-id", "0"),
                *("--omni-dp-size-local", str(replicas), "--omni-heartbeat-timeout", str(_TTL_S)),
                *("--etcd-endpoints", hub.endpoint, "--namespace", hub.namespace),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            cwd=Path(__file__).resolve().parents[2],
        )
        self._view = OmniCoordClientForHub(hub.endpoint, namespace=hub.namespace, ttl_s=_TTL_S)
        self._killed: set[int] = set()

    def up(self) -> list[int]:
        """The process ids of the replicas that are up, the longest first."""
        infos = sorted(self._view.get_replica_list().replicas, key=lambda info: info.registered_at)
        return [info.pid for info in infos if info.pid not in self._killed]

    def kill_one(self) -> int:
        """Kill the one that has been up for longest; how many others are up."""
        pids = self.up()
        if pids:
            self._killed.add(pids[0])
            os.kill(pids[0], signal.SIGKILL)
        return len(pids) - 1

    @property
    def kills(self) -> int:
        """How many were killed."""
        return len(self._killed)

    def close(self) -> None:
        """End all, at once."""
        self._view.close()
        for _ in range(2):
            self._supervisor.send_signal(signal.SIGTERM)
        try:
            self._supervisor.wait(20)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()
        self._log.close()


async def _load_and_kill(client: SteadyClient, victims: Victims, seconds: float, rate: float, every_s: float) -> int:
    """Ask and kill at the same time; the least number of replicas that were up just after a kill."""
    least = all_up = len(victims.up())

    async def keep_killing() -> None:
        nonlocal least
        while True:
            await asyncio.sleep(every_s)
            # A request has three attempts: where replicas die faster than they start, it can't but fail.
            if 2 * len(victims.up()) > all_up:
                least = min(least, victims.kill_one())

    killer = asyncio.create_task(keep_killing())
    await client.ask_for(seconds, rate)
    killer.cancel()
    return least


def _counts(hub: Hub) -> Counter[str]:
    """What the hub has counted so far."""
    found: Counter[str] = Counter()
    for name, value in _COUNTED.findall(hub.get("/metrics")[1]):
        found[name] += int(float(value))
    return found


def soak(folder: Path, seconds: float, rate: float, every_s: float = 1.0, replicas: int = 4) -> report.Row:
    """Run it; counts and latencies, ``errors`` among them, with ``examples`` of those."""
    hub = Hub.of_yaml(folder, _DEPLOY, "--hub-only", "--omni-heartbeat-timeout", str(_TTL_S))
    try:
        wait_for("etcd", lambda: hub.endpoint)
        victims = Victims(hub, replicas)
        try:
            hub.wait_ready()
            wait_for("all replicas", lambda: len(victims.up()) == replicas)
            client = SteadyClient(hub.url, _WORDS)
            asyncio.run(client.ask_for(1.0, 20.0))
            client.latencies_s.clear()
            before = _counts(hub)
            least = asyncio.run(_load_and_kill(client, victims, seconds, rate, every_s))
            counts = _counts(hub) - before
        finally:
            victims.close()
    finally:
        hub.stop()
    spread = report.spread_ms(client.latencies_s)
    return {
        "seconds": seconds,
        "asked": round(seconds * rate),
        "kills": victims.kills,
        "least_up": least,
        "errors": client.errors.total(),
        **{f"error_{kind}": count for kind, count in client.errors.items()},
        **{name: counts[name] for name in ("retries", "continuations", "session_losses")},
        "p50_ms": spread["p50_ms"],
        "p99_ms": spread["p99_ms"],
        "max_ms": round(1000 * max(client.latencies_s, default=0.0), 1),
        "examples": client.examples,
    }


def main() -> None:
    """Soak, print the counts, write them as JSON; exit with 1 if a client saw an error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=200.0, help="requests per second")
    parser.add_argument("--every-s", type=float, default=1.0, help="between two kills")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--out", type=Path, help="path of the JSON file to write")
    arguments = parser.parse_args()
    results: report.Row = {"machine": report.machine()}
    with TemporaryDirectory() as folder:
        row = soak(Path(folder), arguments.seconds, arguments.rate, arguments.every_s, arguments.replicas)
    results["soak"] = row
    report.show("one of the replicas killed again and again", [{k: v for k, v in row.items() if k != "examples"}])
    for example in row["examples"]:
        report.console.print(example, markup=False)
    results["machine"]["load_average_at_the_end"] = report.machine()["load_average"]
    report.write(arguments.out, results)
    raise SystemExit(1 if row["errors"] else 0)


if __name__ == "__main__":
    main()
