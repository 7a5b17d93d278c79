"""What a pick costs: the hub's own call, per policy and size of the pool, and the peer's whole pick beside it.

    python -m tests.bench.picking [--out FILE] [--peer-wheel FILE]

Each pool is in a steady state: about one request in flight per replica. A turn is one pick with its binding, timed,
then one release with a report, timed. Where replicas grant credits, each has one or two, so that it leaves the index
and comes back again and again; the grant is timed with the report.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from hub.pool.stage_pool import StagePool
from omni_discovery.balancing.base import Task
from omni_discovery.balancing.policies import LoadBalancingPolicy, build_load_balancer_factory
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from tests.support.pools import accept

_SIZES: Final = (4, 64, 1000, 5000)
_TURNS: Final = 20_000


def replica(number: int, weight: float = 1.0) -> ReplicaInfo:
    address = f"tcp://10.0.{number // 250}.{number % 250}:4000"
    return ReplicaInfo(
        address + "1", address + "2", 0, ReplicaStatus.UP, 0, 0.0, 0.0, replica_id=number, capacity=8, weight=weight
    )


def full_pool(policy: str, size: int, weights: tuple[float, ...], gated: bool) -> StagePool:
    """A pool of which every replica answers; with two credits each if they are gated."""
    pool = StagePool(0, build_load_balancer_factory(policy)())
    for number in range(size):
        info = replica(number, weights[number % len(weights)])
        pool.core.upsert(info, pool.now())
        pool.core.session_up(info.input_addr, pool.now(), uses_credits=gated)
        pool.core.grant(info.input_addr, 2)
    return pool


def quantiles(samples: list[int]) -> dict[str, int]:
    cuts = statistics.quantiles(samples, n=100)
    return {"p50_ns": round(cuts[49]), "p99_ns": round(cuts[98])}


def measure(policy: str, size: int, weights: tuple[float, ...] = (1.0,), gated: bool = False) -> dict[str, Any]:
    """Nanoseconds of pick + bind and of release + report, in a pool of ``size``."""
    pool, clock, chance = full_pool(policy, size, weights, gated), time.perf_counter_ns, random.Random(size)
    tasks: list[Task] = [
        {"request_id": f"r{number}", "engine_inputs": {"prompt": f"{chance.random()} " * 20}, "sampling_params": {}}
        for number in range(1000)
    ]
    busy: deque[tuple[str, str]] = deque()
    picks: list[int] = []
    releases: list[int] = []
    gc.collect()
    gc.disable()
    for turn in range(size + _TURNS):
        request_id, task = f"r{turn}", tasks[turn % 1000]
        before = clock()
        found = pool.core.try_pick(request_id, task)
        took = clock() - before
        assert found is not None
        accept(pool.core, request_id)
        busy.append((request_id, found.addr))
        if turn < size:
            continue
        picks.append(took)
        busy.rotate(chance.randrange(-8, 8))
        done, addr = busy.popleft()
        left = len(pool.core.members.in_flight(addr)) - 1
        before = clock()
        pool.release(done)
        pool.core.report(addr, left, pool.now())
        if gated:
            pool.core.grant(addr, 1)
        releases.append(clock() - before)
    gc.enable()
    return {"pick_bind": quantiles(picks), "release_report": quantiles(releases)}


def timer_ns() -> int:
    """What reading the clock twice costs: it is part of every figure."""
    clock = time.perf_counter_ns
    return round(statistics.median(-(clock() - clock()) for _ in range(10_000)))


def run(peer_wheel: str | None, say: Callable[[str], object] = print) -> dict[str, Any]:
    """Measure everything."""
    results: dict[str, Any] = {"timer_ns": timer_ns(), "python": sys.version.split()[0], "policies": {}}
    cases = [(policy.value, policy.value, (1.0,), False) for policy in LoadBalancingPolicy]
    for policy in ("random", "round-robin", "least-load"):
        cases.append((f"{policy}, mixed weights", policy, (1.0, 0.5, 3.0), False))
        cases.append((f"{policy}, by credits", policy, (1.0,), True))
    for title, policy, weights, gated in cases:
        results["policies"][title] = by_size = {}
        for size in _SIZES:
            by_size[size] = found = measure(policy, size, weights, gated)
            pick, done = found["pick_bind"], found["release_report"]
            say(
                f"{title:28} {size:5} replicas  pick+bind p50 {pick['p50_ns']:6} p99 {pick['p99_ns']:6} ns"
                f"  release+report p50 {done['p50_ns']:6} p99 {done['p99_ns']:6} ns"
            )
    if peer_wheel:
        from tests.bench.peer_picking import measure_peer

        results["peer"] = {}
        for policy_name in ("random", "round-robin", "least-queue-length"):
            results["peer"][policy_name] = rows = {}
            for size in _SIZES:
                rows[size] = quantiles(measure_peer(peer_wheel, policy_name, size))
                say(f"peer, {policy_name:22} {size:5} replicas  whole pick p50 {rows[size]['p50_ns']:6} ns")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="where the figures go, as JSON")
    parser.add_argument("--peer-wheel", help="the peer's wheel, to measure its pick, too")
    arguments = parser.parse_args()
    results = run(arguments.peer_wheel)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
