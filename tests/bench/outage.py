"""etcd is killed under load, stays away, and comes back on its data: who is lost, and how long until all is well.

Replicas are real registrars, many in one process on one connection, and a few real clients in processes of their own
that change their load all the while; one real hub looks on. Lost is any replica that a view of the hub ever lacked.
All is well when the hub's view is proved fresh and holds all, and every key in etcd stands under a live lease.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from omni_discovery.records import keys
from tests.bench.actors import Actor
from tests.bench.ours import FIRST_SIMULATED, OurHub, OurReplica, Registrars
from tests.bench.report import Row
from tests.support.registry import EtcdServer, etcdctl

_TTL_S: Final = 10.0
_NAMESPACE: Final = "bench-outage"
_LOOK_EACH_S: Final = 0.05


class _Onlooker:
    """Looks at the hub's view and moves the load of the real clients, over and over."""

    def __init__(self, hub: Actor, clients: list[Actor], wanted: int) -> None:
        self.least = wanted
        self.stale_after_s: float | None = None
        self.fresh_after_s: float | None = None
        self._hub, self._clients, self._wanted = hub, clients, wanted
        self._marked_s = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def mark(self) -> None:
        """Count the moments that follow from now."""
        self._marked_s = time.monotonic()
        self.fresh_after_s = None

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        turn = 0
        while not self._over.wait(_LOOK_EACH_S):
            turn += 1
            for client in self._clients:
                client.call("load", turn)
            count, is_fresh = self._hub.call("state")
            self.least = min(self.least, count)
            passed_s = time.monotonic() - self._marked_s
            if not is_fresh and self.stale_after_s is None:
                self.stale_after_s = passed_s
            if is_fresh and count == self._wanted and self.fresh_after_s is None and self.stale_after_s is not None:
                self.fresh_after_s = passed_s


def _registered(endpoint: str) -> int:
    prefix = keys.replicas_prefix(_NAMESPACE)
    return len(etcdctl(endpoint, "get", prefix, "--prefix", "--keys-only").split())


def _until_all(endpoint: str, wanted: int, timeout_s: float) -> float:
    began_s = time.monotonic()
    while _registered(endpoint) != wanted and time.monotonic() < began_s + timeout_s:
        time.sleep(0.2)
    return time.monotonic() - began_s


def measure(replicas: int, outage_s: float, clients: int) -> Row:
    """Kill etcd for ``outage_s``; what became of the replicas."""
    wanted = replicas + clients
    with TemporaryDirectory() as folder, ExitStack() as stack:
        server = EtcdServer(Path(folder))
        stack.callback(server.kill)
        server.start()
        stack.enter_context(Actor(Registrars, server.endpoint, _NAMESPACE, FIRST_SIMULATED, replicas, _TTL_S))
        parts = [stack.enter_context(Actor(OurReplica, server.endpoint, _NAMESPACE)) for _ in range(clients)]
        for number, part in enumerate(parts):
            part.call("register", f"tcp://10.8.0.{number}:4000")
        hub = stack.enter_context(Actor(OurHub, server.endpoint, _NAMESPACE))
        hub.call("open")
        while hub.call("state")[0] != wanted:
            time.sleep(0.1)
        onlooker = _Onlooker(hub, parts, wanted)
        stack.callback(onlooker.close)
        time.sleep(2.0)
        server.kill()
        onlooker.mark()
        time.sleep(outage_s)
        onlooker.mark()
        server.start()
        registered_s = _until_all(server.endpoint, wanted, 3 * _TTL_S)
        # Whatever was not renewed in time would be gone after this.
        time.sleep(1.5 * _TTL_S)
        onlooker.close()
        return {
            "replicas": wanted,
            "etcd_away_s": outage_s,
            "stale_after_s": _rounded(onlooker.stale_after_s),
            "least_replicas_in_view": onlooker.least,
            "fresh_and_complete_s_after_return": _rounded(onlooker.fresh_after_s),
            "all_keys_s_after_return": _rounded(registered_s),
            "all_keys_1.5_ttl_later": _registered(server.endpoint) == wanted,
            "ttl_s": _TTL_S,
        }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)
