"""What one seed means: how large the cluster is, what is asked of it, and what breaks when. Plain data, as JSON too."""

from __future__ import annotations

import random
from typing import Final

import msgspec


class Fault(msgspec.Struct, frozen=True):
    """One fault. ``stage``, ``index`` and ``hub`` name what breaks, as far as the kind needs it."""

    at_s: float
    kind: str
    for_s: float = 0.0
    stage: int = 0
    index: int = 0
    hub: int = 0
    member: int = 0


class Ask(msgspec.Struct, frozen=True):
    """One request of a client. ``leaves_s``: the client goes away so long after it has asked.

    ``reads_s``: it takes so long over each output.
    """

    at_s: float
    hub: int
    words: int
    timeout_s: float = 30.0
    leaves_s: float | None = None
    reads_s: float = 0.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run."""

    seed: int
    hubs: int = 1
    #: Replicas of each stage.
    stages: tuple[int, ...] = (2,)
    capacity: int = 2
    ttl_s: float = 10.0
    load_s: float = 1.0
    step_s: float = 0.05
    #: Faults and requests happen within this time after the cluster has come up.
    length_s: float = 60.0
    #: How much of that is not quiet; 0: all.
    busy_s: float = 0.0
    policy: str = "least-load"
    #: Stages whose engine says that its output is a function of its input.
    deterministic: tuple[int, ...] = ()
    async_chunk: bool = False
    max_waiting: int = 256
    max_in_flight: int = 512
    #: Outputs that may wait for one client.
    max_queued: int = 512
    stall_after_s: float = 8.0
    drain_timeout_s: float = 10.0
    #: The chance that a packet is lost and sent again; and what packets take beyond the least, on average.
    loss: float = 0.0
    jitter_s: float = 0.0005
    #: The longest that a thread takes to notice what another one has left it.
    wake_s: float = 0.0005
    #: Whether a process listens where the one before it did.
    reuses_ports: bool = False
    faults: tuple[Fault, ...] = ()
    asks: tuple[Ask, ...] = ()

    @property
    def offered_load(self) -> float:
        """The share of the slots of the smallest stage that the requests need."""
        needed_s = sum(ask.words for ask in self.asks) * self.step_s
        return needed_s / ((self.busy_s or self.length_s) * min(self.stages) * self.capacity)

    @property
    def busiest_load(self) -> float:
        """The same share, of the ten seconds in which most is asked."""
        asks = sorted(self.asks, key=lambda ask: ask.at_s)
        most = words = first = 0
        for ask in asks:
            words += ask.words
            while asks[first].at_s < ask.at_s - _WINDOW_S:
                words -= asks[first].words
                first += 1
            most = max(most, words)
        return most * self.step_s / (_WINDOW_S * min(self.stages) * self.capacity)


#: The length of the time in which a burst of requests is noticed.
_WINDOW_S: Final = 10.0

#: The kinds of faults, and how long the longest of each lasts. Each run has some of them.
KINDS: Final = {
    "kill replica": 0.0,
    "kill hub": 0.0,
    "pause replica": 25.0,
    "pause hub": 12.0,
    "hold replica": 20.0,
    "hang engine": 20.0,
    "crash engine": 0.0,
    "terminate replica": 0.0,
    "drain by key": 0.0,
    "cordon": 10.0,
    "cut hub from replica": 15.0,
    "cut one way": 15.0,
    "cut replica from etcd": 25.0,
    "cut hub from etcd": 25.0,
    "power off": 15.0,
    "etcd leader": 5.0,
    "etcd member": 20.0,
    "etcd member behind": 15.0,
    "etcd away": 20.0,
    "etcd compacts": 0.0,
    "etcd loses answers": 10.0,
    "etcd loses a key": 0.0,
    "etcd loses a lease": 0.0,
    "etcd wiped": 0.0,
    "nonsense in etcd": 5.0,
    "revoke hub": 15.0,
    "slow network": 10.0,
    "clock jumps": 10.0,
}


def draw(seed: int) -> Plan:
    """The plan of a seed: which faults there are at all is drawn first, then how many and when."""
    chance = random.Random(f"plan {seed}")
    hubs = chance.choice((1, 1, 2, 2, 3))
    stages = tuple(chance.choice((1, 2, 2, 3, 4)) for _ in range(chance.choice((1, 1, 2, 2, 3))))
    length_s = chance.choice((60.0, 120.0, 240.0))
    plan = Plan(
        seed=seed,
        hubs=hubs,
        stages=stages,
        capacity=chance.choice((1, 2, 4, 8)),
        ttl_s=chance.choice((3.0, 5.0, 10.0)),
        load_s=chance.choice((0.2, 1.0, 5.0)),
        step_s=chance.choice((0.02, 0.05, 0.2)),
        length_s=length_s,
        policy=chance.choice(
            ("least-load", "least-load", "random", "round-robin", "least-queue-length", "power-of-two", "prefix-hash")
        ),
        deterministic=tuple(stage for stage in range(len(stages)) if chance.random() < 0.5),
        async_chunk=chance.random() < 0.3,
        max_waiting=chance.choice((4, 256)),
        stall_after_s=chance.choice((5.0, 8.0)),
        drain_timeout_s=chance.choice((2.0, 10.0, 30.0)),
        loss=chance.choice((0.0, 0.0, 0.01, 0.05)),
        jitter_s=chance.choice((0.0001, 0.0005, 0.005)),
        wake_s=chance.choice((0.0, 0.0005, 0.005)),
        reuses_ports=chance.random() < 0.5,
        max_queued=chance.choice((8, 512)),
    )
    kinds = [kind for kind in KINDS if chance.random() < chance.choice((0.1, 0.3))]
    return msgspec.structs.replace(plan, faults=_faults(plan, kinds, chance), asks=_asks(plan, chance))


def stretched(plan: Plan, length_s: float) -> Plan:
    """The same plan over so many seconds: between its bursts of requests and faults nothing happens for long."""
    chance = random.Random(f"quiet {plan.seed}")
    at_s = sorted(chance.uniform(0.0, plan.length_s) for _ in range(chance.choice((1, 2, 3))))
    shares = [chance.random() for _ in at_s]
    scale = max(0.0, length_s - plan.length_s) / sum(shares)
    quiet = [(each_s, share * scale) for each_s, share in zip(at_s, shares, strict=True)]

    def moved(moment_s: float) -> float:
        return round(moment_s + sum(for_s for from_s, for_s in quiet if from_s < moment_s), 3)

    return msgspec.structs.replace(
        plan,
        length_s=max(length_s, plan.length_s),
        busy_s=plan.length_s,
        faults=tuple(msgspec.structs.replace(fault, at_s=moved(fault.at_s)) for fault in plan.faults),
        asks=tuple(msgspec.structs.replace(ask, at_s=moved(ask.at_s)) for ask in plan.asks),
    )


def _faults(plan: Plan, kinds: list[str], chance: random.Random) -> tuple[Fault, ...]:
    if not kinds:
        return ()
    count = chance.randint(1, round(plan.length_s / chance.choice((3, 6, 12))))
    faults = []
    for _ in range(count):
        kind = chance.choice(kinds)
        stage = chance.randrange(len(plan.stages))
        faults.append(
            Fault(
                at_s=round(chance.uniform(0.0, plan.length_s), 3),
                kind=kind,
                for_s=round(KINDS[kind] * chance.choice((0.02, 0.2, 0.5, 1.0)) * chance.random(), 3),
                stage=stage,
                index=chance.randrange(plan.stages[stage]),
                hub=chance.randrange(plan.hubs),
                member=chance.randrange(3),
            )
        )
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _asks(plan: Plan, chance: random.Random) -> tuple[Ask, ...]:
    rate = chance.choice((0.1, 0.5, 2.0))
    slow = chance.choice(((0.0,), (0.0,), (0.0, 0.05, 1.0)))
    asks = []
    at_s = 0.0
    while (at_s := at_s + chance.expovariate(rate)) < plan.length_s:
        words = max(1, round(chance.expovariate(1 / 12)))
        leaves_s = round(chance.uniform(0.0, 3.0), 3) if chance.random() < 0.1 else None
        timeout_s = chance.choice((5.0, 30.0, 30.0))
        reads_s = chance.choice(slow) if chance.random() < 0.2 else 0.0
        asks.append(Ask(round(at_s, 3), chance.randrange(plan.hubs), min(words, 60), timeout_s, leaves_s, reads_s))
    if chance.random() < 0.25:
        # Many short ones at about the same time.
        at_s = chance.uniform(0.0, plan.length_s - 10.0)
        moments = sorted(chance.uniform(at_s, at_s + 8.0) for _ in range(chance.choice((20, 60))))
        asks += [Ask(round(each, 3), chance.randrange(plan.hubs), chance.randint(1, 4)) for each in moments]
    return tuple(asks)
