"""The peer's whole pick, by its own pool, list client and balancers, as published in its wheel.

What its pool imports beyond its coordinator package is an empty stand-in; nothing of it is called by a pick.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
import time
from types import ModuleType
from typing import Any, Final

from tests.bench.peer import load

_PACKAGES: Final = ("vllm.v1", "vllm.v1.metrics", "vllm_omni.engine", "vllm_omni.inputs")
_MODULES: Final = (
    "vllm.logger",
    "vllm.v1.engine",
    "vllm.v1.metrics.stats",
    "vllm_omni.data_entry_keys",
    "vllm_omni.engine.serialization",
    "vllm_omni.engine.stage_client",
    "vllm_omni.inputs.data",
    "vllm_omni.metrics",
    "vllm_omni.metrics.stats",
    "vllm_omni.metrics.utils",
)
_BALANCERS: Final = {
    "random": "RandomBalancer",
    "round-robin": "RoundRobinBalancer",
    "least-queue-length": "LeastQueueLengthBalancer",
}
_PICKS: Final = 300


class _StandIn(ModuleType):
    """Has every name, each an empty class or, for functions, one that takes anything."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() else lambda *_: None


def _pool_module(wheel: str) -> Any:
    load(wheel)
    for name in (*_PACKAGES, *_MODULES):
        stand_in = _StandIn(name)
        stand_in.__path__ = [f"{wheel}/{name.replace('.', '/')}"]
        sys.modules.setdefault(name, stand_in)
    return importlib.import_module("vllm_omni.engine.stage_pool")


def measure_peer(wheel: str, policy: str, size: int) -> list[int]:
    """Nanoseconds of each ``pick`` of a new request in a pool of ``size``."""
    package, module = load(wheel), _pool_module(wheel)
    replicas = [
        package.ReplicaInfo(f"tcp://10.0.{n // 250}.{n % 250}:1", "", 0, package.ReplicaStatus.UP, n % 7, 0.0, 0.0)
        for n in range(size)
    ]
    # Its list client as it is between two messages: it only reads what it has.
    hub = object.__new__(package.OmniCoordClientForHub)
    hub.__dict__.update(_lock=threading.Lock(), _replica_list=package.ReplicaList(replicas, 1.0))
    pool = module.StagePool(0, [])
    for replica in replicas:
        pool.add_client(replica.input_addr, object())
    pool.attach_hub(hub)
    pool.attach_load_balancer(getattr(package, _BALANCERS[policy])())
    assert len(hub.get_replicas_for_stage(0).replicas) == size

    async def picks() -> list[int]:
        took: list[int] = []
        for number in range(_PICKS):
            before = time.perf_counter_ns()
            await pool.pick(f"r{number}")
            took.append(time.perf_counter_ns() - before)
            pool.release(f"r{number}")
        return took

    return asyncio.run(picks())
