"""What floods of strangers cost a hub, and the clients beside them: processor time, memory, latency.

    python -m tests.bench.floods [--seconds 6] [--out floods.json]

One ``omni serve`` on the echo pipeline (16 slots) with an etcd of its own. Before each flood, honest clients are timed
without one: two of them, one chat after the other. A flood runs in a process of its own, from an address of its own, at
the rate that the table says, so that the comparison is not one of who gets the processors. Time-outs are those of
``LIMITS``, shorter than the defaults, so that their effect is seen within one flood.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

import httpx

from omni_discovery.etcd.store import EtcdKV
from tests.support.attackers import PING, Attacker, cpu_s, rss_bytes
from tests.support.hub import Hub
from tests.support.processes import alive, wait_for
from tests.support.registry import EtcdServer, etcdctl

PAIR: Final = """
model: echo
stages:
  - {stage_id: 0, engine: echo, engine_args: {capacity: 8}, runtime: {num_replicas: 2}, final_output: text}
"""
LIMITS: Final = (
    *("--header-timeout", "3", "--body-timeout", "3", "--send-timeout", "3", "--stream-idle-timeout", "2"),
    *("--max-connections", "1000", "--max-unfinished-bytes", str(64 << 20), "--max-requests-per-client", "8"),
)
REPLICAS: Final = "/omni/v1/bench/replicas/0/"
CHAT: Final = {"messages": [{"role": "user", "content": "one two three"}], "timeout": 60}


class Scene:
    """What a flood may use. ``sent`` counts its bytes."""

    def __init__(self, url: str, etcd: str, replicas: Sequence[dict[str, Any]], sent: Any) -> None:
        self.url, self.etcd, self.replicas, self.sent = url, etcd, replicas, sent
        self._opened: list[Attacker] = []

    def keep(self, most: int, begin: Callable[[Attacker], None], url: str = "") -> None:
        """Open one connection more, which stays; beyond ``most`` the oldest leaves."""
        with suppress(OSError, AssertionError):
            attacker = Attacker(url or self.url, 4096, source="127.0.0.2")
            self._opened.append(attacker)
            try:
                begin(attacker)
            finally:
                self.sent.value += attacker.sent_bytes
        if len(self._opened) > most:
            self._opened.pop(0).close()

    def again(self, act: Callable[[Attacker], None], most: int, begin: Callable[[Attacker], None]) -> None:
        """Let the oldest of ``most`` connections act, and open a new one in place of one that was closed."""
        if len(self._opened) < most:
            self.keep(most, begin)
            return
        attacker = self._opened.pop(0)
        before = attacker.sent_bytes
        attacker.socket.settimeout(0.05)
        try:
            act(attacker)
        except TimeoutError:
            pass
        except OSError:
            return
        self._opened.append(attacker)
        self.sent.value += attacker.sent_bytes - before


def nested_frames(scene: Scene) -> None:
    def begin(attacker: Attacker) -> None:
        attacker.open_stream()
        text = '{"type":"segment","messages":[{"role":"user","content":' + "[" * 976 + "]" * 976 + "}]}"
        attacker.send(b"\x81\xfe" + len(text).to_bytes(2, "big") + bytes(4) + text.encode())

    scene.keep(50, begin)


def silent_streams(scene: Scene) -> None:
    def begin(attacker: Attacker) -> None:
        attacker.open_stream()
        attacker.send_frame(type="segment", prompt="a", timeout=3600)

    scene.keep(64, begin)


def half_headers(scene: Scene) -> None:
    scene.keep(600, lambda each: each.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: "))


def half_bodies(scene: Scene) -> None:
    scene.keep(100, lambda each: each.request(b"[" * (1 << 20), Content_Length=str(3 << 20)))


def unread_pongs(scene: Scene) -> None:
    def act(attacker: Attacker) -> None:
        attacker.sent_bytes += attacker.socket.send(PING * 500)

    scene.again(act, 4, lambda each: each.open_stream())


def priorities(scene: Scene) -> None:
    """Without the bound, these go in front of everybody else."""
    body = json.dumps({**CHAT, "priority": -1_000_000}).encode()
    scene.keep(100, lambda each: each.request(body))


def strangers_records(scene: Scene) -> None:
    scene.sent.value += asyncio.run(put_strangers(scene.etcd, scene.replicas[0], 100))


def half_zmtp(scene: Scene) -> None:
    address = str(scene.replicas[0]["input_addr"]).replace("tcp://", "http://")
    scene.keep(1000, lambda each: each.send(b"\xff" + bytes(7)), address)


def long_headers(scene: Scene) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Filler: " + b"x" * 14_000 + b"\r\n\r\n"
    scene.keep(100, lambda each: each.send(head))


def connections(scene: Scene) -> None:
    scene.keep(4000, lambda _: None)


#: Each flood with what it shows and how often a second it acts.
FLOODS: Final[dict[str, tuple[Callable[[Scene], None], str, float]]] = {
    "A5": (nested_frames, "WebSocket frames nested 976 deep, 50/s", 50),
    "A9": (silent_streams, "streams that open a request and go silent, 20/s", 20),
    "A12 header": (half_headers, "headers that never end, 200/s", 200),
    "A12 body": (half_bodies, "bodies of 3 MB that stop after 1 MB, 20/s", 20),
    "A13": (unread_pongs, "pings whose pongs are not read, 4 connections", 50),
    "A17": (priorities, "requests with priority -1000000, 100/s", 100),
    "C3": (half_zmtp, "half-open ZMTP connections to a replica, 200/s", 200),
    "headers": (long_headers, "whole requests with 14 KB of header, 100/s", 100),
    "connections": (connections, "connections that send nothing, 400/s", 400),
    "A24": (strangers_records, "records of nobody in the registry, up to 500/s", 5),
}


async def put_strangers(etcd: str, record: dict[str, Any], most: int) -> int:
    kv, first, sent = EtcdKV(etcd), int(time.time() * 1000) % 1_000_000_000, 0
    try:
        for number in range(first, first + most):
            address = f"tcp://127.{number // 62_500 % 250 + 1}.{number // 250 % 250}.{number % 250}"
            fields = {"replica_id": number, "input_addr": f"{address}:9", "output_addr": f"{address}:10"}
            value = json.dumps({**record, **fields}).encode()
            sent += len(value)
            await kv.put(f"{REPLICAS}{number}", value)
    finally:
        await kv.close()
    return sent


def run_flood(name: str, url: str, etcd: str, replicas: Sequence[dict[str, Any]], sent: Any, over: Any) -> None:
    """The attacker's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    act, _, per_s = FLOODS[name]
    scene, began_s = Scene(url, etcd, replicas, sent), time.monotonic()
    for number in count():
        if over.is_set():
            return
        with suppress(OSError):
            act(scene)
        time.sleep(max(0.0, began_s + number / per_s - time.monotonic()))


@dataclass(frozen=True, slots=True)
class Measured:
    """Honest clients for some seconds."""

    chats: int
    failed: int
    p50_ms: float
    p99_ms: float
    cpu_s: float
    peak_bytes: int


def measure(hub: Hub, seconds: float) -> Measured:
    times: list[float] = []
    failed, end_s = [0], time.monotonic() + seconds

    def ask() -> None:
        with httpx.Client(timeout=90) as client:
            while time.monotonic() < end_s:
                began_s = time.perf_counter()
                try:
                    is_served = client.post(f"{hub.url}/v1/chat/completions", json=CHAT).status_code == 200
                except httpx.HTTPError:
                    is_served = False
                failed[0] += not is_served
                times.append(time.perf_counter() - began_s)
                time.sleep(0.02)

    pids = [pid for pid in hub.tree() if pid in alive(hub.tree())]
    before_s, peak = sum(map(cpu_s, pids)), 0
    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        peak = max(peak, sum(map(rss_bytes, pids)))
        time.sleep(0.1)
    cuts = statistics.quantiles(times, n=100) if len(times) > 1 else times * 99
    spent_s = sum(map(cpu_s, pids)) - before_s
    return Measured(len(times), failed[0], cuts[49] * 1e3, cuts[98] * 1e3, spent_s, peak)


def run_all(hub: Hub, etcd: str, names: Sequence[str], seconds: float) -> list[dict[str, Any]]:
    spawn, rows = multiprocessing.get_context("spawn"), []
    listed = etcdctl(etcd, "get", "--prefix", REPLICAS, "--print-value-only").splitlines()
    replicas = [json.loads(line) for line in listed if line]
    last = max(int(each["replica_id"]) for each in replicas)
    for name in names:
        quiet = measure(hub, seconds)
        rss = sum(rss_bytes(pid) for pid in alive(hub.tree()))
        sent, over = spawn.Value("q", 0), spawn.Event()
        attacker = spawn.Process(target=run_flood, args=(name, hub.url, etcd, replicas, sent, over))
        attacker.start()
        wait_for("the flood", lambda sent=sent, name=name: sent.value or name == "connections")
        time.sleep(1.0)
        begun = sent.value
        flood = measure(hub, seconds)
        sent_bytes = sent.value - begun
        over.set()
        attacker.join(30)
        etcdctl(etcd, "del", "--from-key", f"{REPLICAS}{last + 1}")
        row = {"flood": name, "what": FLOODS[name][1], "sent_bytes": sent_bytes, "rss_bytes": rss}
        rows.append({**row, "quiet": asdict(quiet), "flooded": asdict(flood)})
        sys.stdout.write(f"{line_of(rows[-1])}\n")
        sys.stdout.flush()
        time.sleep(4.0)
    return rows


def line_of(row: dict[str, Any]) -> str:
    """A row of the table in docs/benchmarks.md."""
    quiet, flooded, sent = row["quiet"], row["flooded"], row["sent_bytes"]
    more_s, more_bytes = flooded["cpu_s"] - quiet["cpu_s"], flooded["peak_bytes"] - row["rss_bytes"]
    per_byte = f"{max(0.0, more_s) / sent * 1e9:,.0f} | {max(0, more_bytes) / sent:,.2f}" if sent else "- | -"
    return (
        f"| {row['flood']} | {row['what']} | {sent / 1e6:,.2f} | {max(0.0, more_s):.1f} | {per_byte}"
        f" | {max(0, more_bytes) / 1e6:.0f} | {quiet['p50_ms']:.1f} / {quiet['p99_ms']:.0f}"
        f" | {flooded['p50_ms']:.1f} / {flooded['p99_ms']:.0f} | {flooded['p50_ms'] / quiet['p50_ms']:.1f}"
        f" | {flooded['failed']} of {flooded['chats']} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--only", nargs="+", choices=FLOODS, default=list(FLOODS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        etcd = EtcdServer(folder)
        etcd.start()
        hub = Hub.of_yaml(folder, PAIR, "--etcd-endpoints", etcd.endpoint, *LIMITS, "--namespace", "bench")
        try:
            hub.wait_ready()
            measure(hub, 2.0)
            rows = run_all(hub, etcd.endpoint, arguments.only, arguments.seconds)
            assert hub.ask("one two")[0] == 200, "the hub is not well again"
        finally:
            hub.stop()
            etcd.kill()
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
