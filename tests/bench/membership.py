"""What a list and a change cost a hub: the first complete list of a new hub, and the bytes for one change.

The first list is timed from the constructor of the hub's client to the list with every replica in it, in a process
that has everything imported. Bytes are counted by a TCP proxy between the hub and its source, both ways, without the
headers of TCP and IP, over changes of one replica's queue length among all; what passes while nothing changes is
counted too and shown beside it.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from omni_discovery.etcd.embedded import EmbeddedEtcd
from tests.bench.actors import Actor
from tests.bench.ours import OurCrowd, OurHub
from tests.bench.peer import PeerCoordinator, PeerCrowd, PeerHub
from tests.bench.proxy import CountingProxy
from tests.bench.report import Row, spread_ms

_QUIET_S: Final = 5.0
#: The peer joins all changes of a tenth of a second into one list, so its changes come further apart.
_SPACING_S: Final = 0.15


def first_lists(etcd: EmbeddedEtcd, replicas: int, rounds: int, wheel: str | None) -> list[Row]:
    """How long a new hub waits for its first complete list, each system in turn."""
    with ExitStack() as stack:
        namespace = f"bench-list-{replicas}"
        crowd = stack.enter_context(Actor(OurCrowd, etcd.endpoint, namespace, 0))
        crowd.call("grow", replicas, timeout_s=300.0)
        hubs = {"omni-discovery": stack.enter_context(Actor(OurHub, etcd.endpoint, namespace))}
        if wheel:
            router, publisher = stack.enter_context(Actor(PeerCoordinator, wheel)).call("addresses")
            stack.enter_context(Actor(PeerCrowd, router)).call("grow", replicas)
            hubs["peer"] = stack.enter_context(Actor(PeerHub, wheel, publisher))
            # Past its first publications, so that a new hub meets it as it is in the steady state.
            time.sleep(6.0)
        samples_s: dict[str, list[float]] = {name: [] for name in hubs}
        for turn in range(rounds + 1):
            for name, hub in hubs.items():
                time.sleep(random.uniform(0.0, 0.5))
                took_s = hub.call("first_list_s", replicas)
                if turn:
                    samples_s[name].append(took_s)
    return [{"system": name, "replicas": replicas, **spread_ms(samples)} for name, samples in samples_s.items()]


def bytes_per_change(etcd: EmbeddedEtcd, replicas: int, changes: int, wheel: str | None) -> list[Row]:
    """What one hub receives and sends for one change among ``replicas``."""
    with ExitStack() as stack:
        namespace = f"bench-bytes-{replicas}"
        crowd = stack.enter_context(Actor(OurCrowd, etcd.endpoint, namespace, 0))
        crowd.call("grow", replicas, timeout_s=300.0)
        proxy = CountingProxy(etcd.endpoint)
        stack.callback(proxy.close)
        stack.enter_context(Actor(OurHub, proxy.address, namespace)).call("open")
        rows = [_count("omni-discovery", replicas, proxy, crowd, changes)]
        if wheel:
            router, publisher = stack.enter_context(Actor(PeerCoordinator, wheel)).call("addresses")
            peers = stack.enter_context(Actor(PeerCrowd, router))
            peers.call("grow", replicas)
            far = CountingProxy(publisher.removeprefix("tcp://"))
            stack.callback(far.close)
            stack.enter_context(Actor(PeerHub, wheel, f"tcp://{far.address}")).call("open")
            rows.append(_count("peer", replicas, far, peers, changes))
    return rows


def _count(name: str, replicas: int, proxy: CountingProxy, crowd: Actor, changes: int) -> Row:
    # What a hub says of itself at its start is no part of either figure.
    time.sleep(2.0)
    idle_bytes = _passed(proxy, lambda: time.sleep(_QUIET_S))
    per_change = []
    for turn in range(changes):
        # The first digits of a length are many bytes apart from the last; three digits are usual.
        length = 100 + turn % 800
        per_change.append(_passed(proxy, lambda length=length: _change(crowd, replicas, length)))  # type: ignore[misc]
    return {
        "system": name,
        "replicas": replicas,
        "median_bytes_per_change": int(statistics.median(per_change)),
        "mean_bytes_per_change": int(statistics.mean(per_change)),
        "changes": changes,
        "bytes_per_s_without_changes": int(idle_bytes / _QUIET_S),
    }


def _change(crowd: Actor, replicas: int, queue_length: int) -> None:
    crowd.call("change", random.randrange(replicas), queue_length)
    time.sleep(_SPACING_S)


def _passed(proxy: CountingProxy, act: Callable[[], object]) -> int:
    before = proxy.passed_bytes()
    act()
    return proxy.passed_bytes() - before
