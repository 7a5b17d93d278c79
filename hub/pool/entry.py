"""Entry: what a pool keeps of one replica; Binding: one request's work at one replica. Pure; only Pool writes them."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

from hub.pool.outliers import Health
from hub.pool.silence import Silence
from omni_discovery.balancing.base import Member

if TYPE_CHECKING:
    from hub.pool.core import Pool
    from hub.pool.snapshots import PoolSnapshot, ReplicaRow
    from omni_discovery.records.schema import ReplicaInfo

#: The tier of an entry that is in no index; tier 0 is picked from first.
NO_TIER: Final = -1
#: The mean time of service, of a replica and of a stage, is over about so many requests.
MEAN_OF: Final = 20


class BindingState(Enum):
    """How far the work of a binding has come."""

    #: Picked. The replica's queue length does not count it yet.
    BOUND = "bound"
    #: The replica has accepted the dispatch: its reports count it from now on.
    ACCEPTED = "accepted"
    #: Over; the slot is free again.
    RELEASED = "released"


class BindingEnd(Enum):
    """Why a binding is released."""

    #: The stage's work is over, whatever its outcome.
    DONE = "done"
    #: The replica never received the dispatch: a credit that it spent can be spent again.
    UNSENT = "unsent"


class Binding:
    """One request's work at one replica, from the pick to its release."""

    __slots__ = ("_pool", "entry", "request_id", "snapshot", "spent_credit", "state")

    def __init__(
        self, pool: Pool, request_id: str, entry: Entry, spent_credit: bool, snapshot: PoolSnapshot | None = None
    ) -> None:
        self._pool = pool
        self.request_id = request_id
        self.entry = entry
        #: Whether it spent a credit of the session that is still up.
        self.spent_credit = spent_credit
        self.state = BindingState.BOUND
        #: What the pool looked like when it picked; None where nobody keeps receipts.
        self.snapshot = snapshot

    def __repr__(self) -> str:
        credit = ", credit" if self.spent_credit else ""
        return f"Binding({self.request_id} at {self.entry.addr}, {self.state.name}{credit})"

    @property
    def info(self) -> ReplicaInfo:
        """The record of the replica, as last known."""
        return self.entry.info

    @property
    def addr(self) -> str:
        """The input address of the replica."""
        return self.entry.addr

    def accept(self) -> None:
        """The replica has accepted the dispatch. Idempotent; does nothing once released."""
        if self.state is BindingState.BOUND:
            self.state = BindingState.ACCEPTED
            self.entry.accepted += 1

    def release(self, end: BindingEnd = BindingEnd.DONE) -> bool:
        """Free the slot; return False, and change nothing, if that was done before."""
        if self.state is BindingState.RELEASED:
            return False
        self._pool.end_binding(self, end)
        return True


class Entry(Member):
    """A replica that is registered, held or has work in flight."""

    __slots__ = (
        "accepted",
        "accepted_at_report",
        "answers",
        "credits",
        "down_reason",
        "down_since_s",
        "ejected_free",
        "first_up_s",
        "health",
        "held",
        "in_flight",
        "is_local",
        "listed",
        "mean_service_s",
        "pickable",
        "refused",
        "registered",
        "reported_at_s",
        "row",
        "send_queue_full_until_s",
        "served",
        "served_at_s",
        "silence",
        "tier",
        "unusable",
        "uses_credits",
        "warm_at_s",
    )

    def __init__(self, info: ReplicaInfo, is_local: bool, now_s: float = 0.0) -> None:
        super().__init__(info)
        #: Whether the registry lists it. An entry that is not listed stays only while requests are in flight there.
        self.registered = True
        #: Whether it is served though the registry lists it no more.
        self.held = False
        #: Whether its data-plane session is up.
        self.answers = False
        #: Since when it does not answer, monotonic, and why its session ended; empty if it had none yet.
        self.down_since_s, self.down_reason = now_s, ""
        #: Whether its session goes by credits, and how many are left to spend.
        self.uses_credits, self.credits = False, 0
        #: Bindings by request id, in the order of their picks.
        self.in_flight: dict[str, Binding] = {}
        #: How many of them the replica has accepted now, and had when its last report came.
        self.accepted, self.accepted_at_report = 0, 0
        #: When a frame last brought a report, monotonic; None before the first.
        self.reported_at_s: float | None = None
        #: When this process of the replica first answered, and when its slow start ends; None where it has none.
        self.first_up_s: float | None = None
        self.warm_at_s: float | None = None
        #: Requests that it has served, the mean time of the last ones, and when the last was served, monotonic.
        self.served, self.mean_service_s, self.served_at_s = 0, 0.0, 0.0
        self.health = Health()
        self.silence = Silence()
        #: Whether it has all labels that the hub prefers.
        self.is_local = is_local
        #: Registered or held; and answering and taking new work, too: an affinity may use it.
        self.listed = self.pickable = False
        self.tier = NO_TIER
        #: Whether it has a free slot and is in no index only because it is ejected.
        self.ejected_free = False
        #: What receipts show of it, until it changes; None: to be made again.
        self.row: ReplicaRow | None = None
        #: Until when nothing is sent because its send queue was full, monotonic; 0 where that is not so.
        self.send_queue_full_until_s = 0.0
        #: Why this hub can't open a session with it; empty where it can.
        self.unusable = ""
        #: Why it must not be picked for the deploy document that it runs; empty where it may be.
        self.refused = ""

    def __repr__(self) -> str:
        session = f"{self.credits} credits" if self.uses_credits else "no credits"
        where = "pickable" if self.pickable else "listed" if self.listed else "gone"
        health = self.health.state.name
        load = f"load {self.load}/{self.capacity}, {len(self.in_flight)} in flight"
        return f"Entry({self.addr}, {where}, {health}, {load}, {session})"

    def is_same_process(self, info: ReplicaInfo) -> bool:
        """Whether a record under the same address is of the same process."""
        mine = self.info
        return (mine.pid, mine.host, mine.curve_public_key) == (info.pid, info.host, info.curve_public_key)

    def reload(self, hubs: int) -> None:
        """Recompute the load estimate: the last report, and for each of ``hubs`` what this one has sent since."""
        own = len(self.in_flight)
        load = self.reported + (own - self.accepted_at_report) * hubs
        self.load = load if load > own else own

    def report(self, queue_length: int, hubs: int) -> None:
        """Store the replica's own queue length and recompute the estimate."""
        self.reported = max(0, queue_length)
        # What is sent but not yet accepted can't be in the replica's count.
        self.accepted_at_report = self.accepted
        self.reload(hubs)

    def own_load(self) -> int:
        """The work at the replica as far as this hub knows, without a guess at what other hubs have sent."""
        own = len(self.in_flight)
        return max(own, self.reported + own - self.accepted_at_report)

    def served_in(self, service_s: float, now_s: float) -> None:
        """It has served a request in so many seconds."""
        self.served += 1
        self.served_at_s = now_s
        self.mean_service_s += (service_s - self.mean_service_s) / min(self.served, MEAN_OF)

    def lose_session(self, now_s: float, reason: str) -> None:
        """It does not answer any more."""
        if self.answers:
            self.down_since_s = now_s
        self.answers = False
        # Its first session may have failed before it was up.
        self.down_reason = reason or self.down_reason

    def void_credits(self) -> None:
        """Credits end with their session: drop the unspent ones, and let no binding give one back."""
        self.credits = 0
        for binding in self.in_flight.values():
            binding.spent_credit = False
