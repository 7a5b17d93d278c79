"""Two faults at once, in different layers. Each pair leaves a replica of each stage and a hub, or a fault that ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from tests.fault.faults import Fault, all_faults
from tests.fault.judge import Promise
from tests.fault.site import Site


@dataclass(frozen=True, slots=True)
class Pair:
    """The names of two faults; the second comes ``after_s`` behind the first, while that lasts or is being mended."""

    first: str
    second: str
    after_s: float = 0.5
    #: How long a stream may stand still beyond what both alone may cost.
    more_s: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.first}+{self.second}"


#: The hub that makes an answer again for a client has shown nothing of it yet: if its replica is lost then, where one
#: other is left, it waits for the next one so long (docs/decisions/0013). To the client that is part of one stall.
_FIRST_WORD_S: Final = 10.0

#: No two of a pair leave the same thing to their heal: a member of etcd, a process, clients, limits of a process.
PAIRS: Final = (
    # The new replica registers, and the dead one's lease ends, by a leader that was not there before.
    Pair("replica-killed", "etcd-leader-killed"),
    Pair("hub-killed", "etcd-member-disconnected"),
    Pair("supervisor-killed", "etcd-down"),
    # The hub starts again before there is an etcd that could tell it of replicas.
    Pair("hub-killed", "etcd-down"),
    # Another hub makes an answer again, and may ask the replica that stands still for it.
    Pair("replica-stopped", "hub-killed", more_s=_FIRST_WORD_S),
    Pair("host-cut-off", "hub-killed", more_s=_FIRST_WORD_S),
    # A hub sees the host silent, and hears nothing of its leases, which end meanwhile.
    Pair("host-cut-off", "etcd-compacted"),
    Pair("lease-revoked", "replica-killed"),
    Pair("rolling-restart", "etcd-leader-killed", after_s=2.0),
    # What starts in place of the dead is granted no lease until there is room.
    Pair("etcd-quota-full", "replica-killed", after_s=4.0),
    Pair("hub-stopped", "replica-killed"),
    # The hub can open no connection to what starts in place of the dead.
    Pair("hub-out-of-descriptors", "replica-killed"),
    # What is left of a stage is behind the bad network, which takes half of what both stages there send: streams wait
    # until it is mended.
    Pair("slow-network", "supervisor-killed", after_s=2.0, more_s=2.5),
    Pair("packets-lost", "replica-out-of-memory", after_s=2.0),
)


def all_pairs() -> dict[str, tuple[Fault, str]]:
    """Every pair as one fault, with a story, by name; see ``all_faults``."""
    known = all_faults()
    return {pair.name: (fault_of(pair, known), f"{pair.first}, then {pair.second}") for pair in PAIRS}


def fault_of(pair: Pair, known: Mapping[str, tuple[Fault, str]]) -> Fault:
    """Both at once: each is healed when its own time is over, and ``break_it`` returns when both are."""
    first, second = known[pair.first][0], known[pair.second][0]

    def break_both(site: Site) -> None:
        with ThreadPoolExecutor(2) as threads:
            both = [threads.submit(_break_and_heal, site, first, 0.0)]
            both.append(threads.submit(_break_and_heal, site, second, pair.after_s))
        for each in both:
            each.result()

    return Fault(
        break_it=break_both,
        prepare=_each(first.prepare, second.prepare),
        restore=_each(second.restore, first.restore),
        promise=together(first.promise, second.promise, pair.more_s),
        why_not=lambda site: first.why_not(site) or second.why_not(site),
        is_noticed=first.is_noticed or second.is_noticed,
    )


def together(first: Promise, second: Promise, more_s: float = 0.0) -> Promise:
    """What is kept under both: one stall may come behind the other, and ``more_s`` behind these."""
    is_as_long = first.stall_s is None or second.stall_s is None
    return Promise(
        stall_s=None if is_as_long else (first.stall_s or 0.0) + (second.stall_s or 0.0) + more_s,
        stall_alone_s=first.stall_alone_s + second.stall_alone_s,
        recovery_s=max(first.recovery_s, second.recovery_s),
        takes_a_hub=first.takes_a_hub or second.takes_a_hub,
    )


def _break_and_heal(site: Site, fault: Fault, after_s: float) -> None:
    time.sleep(after_s)
    fault.break_it(site)
    time.sleep(fault.lasts_s)
    fault.heal(site)


def _each(*acts: Callable[[Site], None]) -> Callable[[Site], None]:
    def act(site: Site) -> None:
        for each in acts:
            each(site)

    return act
