"""What a pool keeps of one replica. Pure; only PoolCore writes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hub.pool.outliers import Health
from omni_discovery.balancing.base import Member

if TYPE_CHECKING:
    from omni_discovery.records.schema import ReplicaInfo

#: Not in an index; else the tier: 0 is asked first.
NOWHERE: Final = -1


#: What is known of one request in flight, or-ed together: the replica has it, it spent a credit, it waited for a slot.
ACCEPTED: Final = 1
CREDIT: Final = 2
WAITED: Final = 4


class Entry(Member):
    """A replica that is listed, held or has work in flight."""

    __slots__ = (
        "accepted",
        "answers",
        "clogged_until_s",
        "credits",
        "first_up_s",
        "gated",
        "health",
        "held",
        "in_flight",
        "in_reserve",
        "listed",
        "near",
        "pickable",
        "refused",
        "registered",
        "reported_at_s",
        "then",
        "tier",
        "unusable",
        "warm_at_s",
    )

    def __init__(self, info: ReplicaInfo, near: bool) -> None:
        super().__init__(info)
        #: Whether the registry lists it. An entry that is not listed stays only while requests are in flight there.
        self.registered = True
        #: Whether it is served though the registry lists it no more.
        self.held = False
        #: Whether its data-plane session is up.
        self.answers = False
        #: Whether its session goes by credits, and how many are left to spend.
        self.gated, self.credits = False, 0
        #: Requests sent there and not finished, in order, with what is known of each.
        self.in_flight: dict[str, int] = {}
        #: How many of them the replica has accepted now, and had when its last report came.
        self.accepted, self.then = 0, 0
        #: When a frame last brought a report, monotonic; None before the first.
        self.reported_at_s: float | None = None
        #: When this life of the replica first answered, and since when it is at its full weight.
        self.first_up_s: float | None = None
        self.warm_at_s: float | None = None
        self.health = Health()
        self.near = near
        #: Registered or held; and answering and taking new work, too: an affinity may use it.
        self.listed = self.pickable = False
        self.tier = NOWHERE
        #: Whether it is in no index only because it is spared.
        self.in_reserve = False
        #: Until when nothing is sent because its send queue was full, monotonic; 0 where that is not so.
        self.clogged_until_s = 0.0
        #: Why this hub can't even try to have a session with it; empty where it can.
        self.unusable = ""
        #: Why it must not be picked for what it runs; empty where it may be.
        self.refused = ""

    def is_same_life(self, info: ReplicaInfo) -> bool:
        """Whether a record under the same address is of the same process."""
        mine = self.info
        return (mine.pid, mine.host, mine.curve_public_key) == (info.pid, info.host, info.curve_public_key)

    def reload(self, hubs: int) -> None:
        """Make the estimate anew: the report, and for each hub as much more as this one has sent since."""
        own = len(self.in_flight)
        load = self.reported + (own - self.then) * hubs
        self.load = load if load > own else own

    def report(self, queue_length: int, hubs: int) -> None:
        """Take in the replica's own count."""
        self.reported = max(0, queue_length)
        # What is sent but not yet accepted can't be in the replica's count.
        self.then = self.accepted
        self.reload(hubs)

    def void_credits(self) -> None:
        """What was granted to a session that is over can't be spent, nor had back."""
        self.credits = 0
        for request_id, flags in self.in_flight.items():
            self.in_flight[request_id] = flags & ~CREDIT
