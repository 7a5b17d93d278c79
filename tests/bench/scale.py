"""Ten thousand replicas: what they cost a hub in memory and processor time, and how often replicas write.

The records are simulated: plain puts under shared leases in one process, on a real etcd. The hub is a real client in a
process of its own. Its memory is what only that process uses, before its first list and after; its processor time is
taken over some seconds without changes, and again while records change at the rate of the write budget. The write
rate is that of a few real registrars whose load changes all the time, while the other records stand; etcd counts.
"""

from __future__ import annotations

import base64
import json
import time
from contextlib import ExitStack
from typing import Final

from omni_discovery.etcd.embedded import EmbeddedEtcd
from omni_discovery.records import keys
from tests.bench.actors import Actor
from tests.bench.ours import FIRST_SIMULATED, OurCrowd, OurHub, Registrars
from tests.bench.report import Row
from tests.bench.visibility import BUDGET_PER_S
from tests.support.registry import etcdctl

_REGISTRARS: Final = 50
_CHANGE_EACH_S: Final = 0.1
_RECORDS_PER_LEASE: Final = 20


def measure(etcd: EmbeddedEtcd, replicas: int, window_s: float, budget_window_s: float) -> list[Row]:
    """The hub's memory and processor time, then the write rate, as one row each."""
    with ExitStack() as stack:
        namespace = f"bench-scale-{replicas}"
        crowd = stack.enter_context(Actor(OurCrowd, etcd.endpoint, namespace, FIRST_SIMULATED))
        hub = stack.enter_context(Actor(OurHub, etcd.endpoint, namespace))
        # A client on the empty namespace first, so that what any connection needs counts as the hub's own.
        hub.call("first_list_s", 0)
        before_bytes = hub.memory_bytes()
        crowd.call("grow", replicas, max(1, replicas // _RECORDS_PER_LEASE), timeout_s=600.0)
        hub.call("open")
        after_bytes = hub.memory_bytes()
        first_list_s = hub.call("first_list_s", replicas)
        quiet = _cores(hub, window_s)
        crowd.call("change_at", BUDGET_PER_S)
        time.sleep(1.0)
        written, began_s = crowd.call("written"), time.monotonic()
        busy = _cores(hub, window_s)
        rate = (crowd.call("written") - written) / (time.monotonic() - began_s)
        crowd.call("change_at", 0.0)
        hub_row: Row = {
            "replicas": replicas,
            "first_list_ms": round(1000 * first_list_s, 1),
            "hub_bytes_per_replica": int((after_bytes - before_bytes) / replicas),
            "hub_mb": round(after_bytes / 1e6, 1),
            "hub_cores_quiet": round(quiet, 4),
            "changes_per_s": round(rate, 1),
            "hub_cores_at_that_rate": round(busy, 4),
            "cpu_us_per_change": round(1e6 * (busy - quiet) / rate, 0) if rate else None,
        }
        return [hub_row, _write_rate(etcd, namespace, replicas, budget_window_s)]


def _cores(hub: Actor, window_s: float) -> float:
    before_s, began_s = hub.cpu_s(), time.monotonic()
    time.sleep(window_s)
    return (hub.cpu_s() - before_s) / (time.monotonic() - began_s)


def _write_rate(etcd: EmbeddedEtcd, namespace: str, replicas: int, window_s: float) -> Row:
    with Actor(Registrars, etcd.endpoint, namespace, 0, _REGISTRARS, 60.0) as writers:
        # They claim, publish and count the others first.
        _keep_changing(writers, 10.0)
        before = _writes(etcd, namespace)
        took_s = _keep_changing(writers, window_s)
        rate = (_writes(etcd, namespace) - before) / took_s / _REGISTRARS
    return {
        "replicas": replicas,
        "registrars_that_change": _REGISTRARS,
        "changes_per_s_each": round(1 / _CHANGE_EACH_S),
        "writes_per_s_each": round(rate, 4),
        "writes_per_s_if_all_did": round(rate * replicas, 1),
        "budget_per_s": BUDGET_PER_S,
    }


def _writes(etcd: EmbeddedEtcd, namespace: str) -> int:
    """How often the registrars' keys have been written, as etcd itself counts it."""
    first = keys.replicas_prefix(namespace, 0)
    found = json.loads(etcdctl(etcd.endpoint, "get", first, "--prefix", "-w", "json")).get("kvs", [])
    numbers = ((int(base64.b64decode(kv["key"]).rpartition(b"/")[2]), kv["version"]) for kv in found)
    return sum(version for number, version in numbers if number < _REGISTRARS)


def _keep_changing(writers: Actor, window_s: float) -> float:
    began_s = time.monotonic()
    turn = 0
    while time.monotonic() - began_s < window_s:
        turn += 1
        writers.call("load", turn)
        time.sleep(_CHANGE_EACH_S)
    return time.monotonic() - began_s
