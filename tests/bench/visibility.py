"""How long until a hub sees it: a replica registers, its queue length changes, it closes.

Measured from the moment before the call in the replica's process to the moment at which the hub's process has it, at
several numbers of registered replicas. Every turn asks each system once, one after the other: a bare put and watch of
a value of the same size on the same etcd (and a bare connect, lease and put, the least that a registration can be),
this project, and the peer if its wheel is given. Changes of the queue length are spaced so that no limit on how often
a replica may write holds them back. A queue length that changes alone waits for its turn in the write budget of the
namespace; so this project's goes with a field that is published at once, and a few that go alone are shown apart.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from omni_discovery.etcd.embedded import EmbeddedEtcd
from tests.bench.actors import Actor
from tests.bench.bare import BareWatcher, BareWriter
from tests.bench.ours import FIRST_SIMULATED, OurCrowd, OurHub, OurReplica
from tests.bench.peer import PeerCoordinator, PeerCrowd, PeerHub, PeerReplica
from tests.bench.report import Row, ratio, spread_ms

_TIMEOUT_S: Final = 15.0
#: All replicas of a namespace together write their load so often at most.
BUDGET_PER_S: Final = 200.0
_ADDRESS: Final = "tcp://10.9.8.7:4000"


@dataclass
class Side:
    """One system: a replica that changes, a hub that watches, and what was measured."""

    name: str
    replica: Actor
    hub: Actor
    samples_s: dict[str, list[float]] = field(default_factory=dict)
    missed: int = 0

    def time(self, what: str, method: str, arguments: tuple[object, ...], queue_length: int | None) -> None:
        """Make one change and wait until the hub has it."""
        self.hub.call("arm", _ADDRESS, queue_length)
        began_s = self.replica.call(method, *arguments)
        seen_s = self.hub.call("seen", _TIMEOUT_S)
        if seen_s:
            self.samples_s.setdefault(what, []).append(seen_s - began_s)
        else:
            self.missed += 1


class Field:
    """All sides at one number of registered replicas."""

    def __init__(self, endpoint: str, replicas: int, wheel: str | None) -> None:
        self._stack = ExitStack()
        self.replicas = replicas
        self.bare = self._side("bare etcd", Actor(BareWriter, endpoint), Actor(BareWatcher, endpoint))
        namespace = f"bench-{replicas}"
        crowd = self._enter(Actor(OurCrowd, endpoint, namespace, FIRST_SIMULATED))
        crowd.call("grow", replicas - 1, timeout_s=300.0)
        self.ours = self._side(
            "omni-discovery", Actor(OurReplica, endpoint, namespace), Actor(OurHub, endpoint, namespace)
        )
        self.ours.hub.call("open")
        self.members = [self.ours]
        if wheel:
            self.members.append(self._peer(wheel))

    def close(self) -> None:
        """End all processes."""
        self._stack.close()

    def _peer(self, wheel: str) -> Side:
        router, publisher = self._enter(Actor(PeerCoordinator, wheel)).call("addresses")
        crowd = self._enter(Actor(PeerCrowd, router))
        crowd.call("grow", self.replicas - 1)
        side = self._side("peer", Actor(PeerReplica, wheel, router), Actor(PeerHub, wheel, publisher))
        side.hub.call("open")
        deadline_s = time.monotonic() + 30.0
        while side.hub.call("count") < self.replicas - 1:
            if time.monotonic() > deadline_s:
                raise TimeoutError("the peer's hub does not see all its replicas")
            time.sleep(0.1)
        return side

    def _side(self, name: str, replica: Actor, hub: Actor) -> Side:
        return Side(name, self._enter(replica), self._enter(hub))

    def _enter(self, actor: Actor) -> Actor:
        return self._stack.enter_context(actor)


def _fall_out_of_step() -> None:
    # Whatever publishes by the clock, as the peer does each tenth of a second, is met at any phase of it.
    time.sleep(random.uniform(0.0, 0.1))


def _turn_of_lives(field_: Field, turn: int) -> None:
    field_.bare.time("put", "load", (turn,), turn)
    field_.bare.time("connect, lease, put", "load_cold", (turn + 1_000_000,), turn + 1_000_000)
    for side in field_.members:
        _fall_out_of_step()
        side.time("register", "register", (_ADDRESS,), 0)
        side.replica.call("wait_registered")
        _fall_out_of_step()
        side.time("close", "withdraw", (), None)


def _turn_of_loads(field_: Field, turn: int, spacing_s: float) -> None:
    until_s = time.monotonic() + spacing_s
    field_.ours.time("queue length", "load", (turn,), turn)
    field_.bare.time("put", "load", (turn,), turn)
    for side in field_.members[1:]:
        _fall_out_of_step()
        side.time("queue length", "load", (turn,), turn)
    time.sleep(max(0.0, until_s - time.monotonic()))


def _warm(field_: Field, turn: Callable[[Field, int], None]) -> None:
    for number in range(3):
        turn(field_, 2_000_000 + number)
    for side in (field_.bare, *field_.members):
        side.samples_s.clear()


def measure(
    etcd: EmbeddedEtcd, replicas: int, turns: int, paced_turns: int, spacing_s: float, wheel: str | None
) -> list[Row]:
    """One row for each system and kind of change, with the ratios that the targets are about."""
    field_ = Field(etcd.endpoint, replicas, wheel)
    try:
        _warm(field_, _turn_of_lives)
        for turn in range(turns):
            _turn_of_lives(field_, turn + 1)
        for side in field_.members:
            side.replica.call("register", _ADDRESS)
            side.replica.call("wait_registered")
        time.sleep(spacing_s)
        for turn in range(turns):
            _turn_of_loads(field_, turn + 1, spacing_s)
        for turn in range(paced_turns):
            # As long as a replica may have to wait between two writes.
            time.sleep(max(spacing_s, replicas / BUDGET_PER_S))
            field_.ours.time("queue length alone", "load_paced", (9_000 + turn,), 9_000 + turn)
        return _rows(field_)
    finally:
        field_.close()


def _rows(field_: Field) -> list[Row]:
    rows = []
    for side in (field_.bare, *field_.members):
        for what, samples_s in side.samples_s.items():
            rows.append({"replicas": field_.replicas, "change": what, "system": side.name, **spread_ms(samples_s)})
            rows[-1]["missed"] = side.missed or None
    by_name = {(row["change"], row["system"]): row for row in rows}
    bare = by_name["put", field_.bare.name]
    cold = by_name["connect, lease, put", field_.bare.name]
    for row in rows:
        floor = cold if row["change"] == "register" else bare
        peer = by_name.get((row["change"], "peer"))
        if row["system"] == field_.ours.name:
            row["p50_by_put"] = ratio(row["p50_ms"], bare["p50_ms"])
            row["p99_by_put"] = ratio(row["p99_ms"], bare["p99_ms"])
            row["p50_by_floor"] = ratio(row["p50_ms"], floor["p50_ms"])
            row["peer_by_ours_p50"] = ratio(peer["p50_ms"], row["p50_ms"]) if peer else None
    return rows
