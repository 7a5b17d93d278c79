"""The replicas of one stage: who is listed, who answers, who may be picked, and how loaded each one is. Pure.

Where each replica of one stage stands: who may be picked, and in which index. Pure.

Replicas that have room though this hub has no credit there: others hold them, and may have no use for them. Pure.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf
from typing import TYPE_CHECKING, Final

from hub.config import PoolOptions
from hub.pool.entry import NOWHERE, Entry
from hub.pool.outliers import Health, Standing, most_ejected
from omni_discovery.balancing.policies import LeastLoadBalancer, index_of
from omni_discovery.records.schema import ReplicaInfo

if TYPE_CHECKING:
    from omni_discovery.balancing.base import PoolIndex
    from omni_discovery.balancing.policies import LoadBalancer


class Withheld:
    """Whom a pick would rather have than one with a credit, had it a credit there.

    That is who is near where others are far (``labels``), and who was given more weight than another and has less to
    do for it (``weights``). Where places and weights are alike it knows of nobody, and costs nothing.
    """

    def __init__(self, *, labels: bool, weights: bool) -> None:
        self._labels, self._weights = labels, weights
        self._near: dict[str, Entry] = {}
        self._heavy: dict[str, Entry] = {}
        #: The least weight that any replica was ever given.
        self._lightest = inf

    def __bool__(self) -> bool:
        return bool(self._near or self._heavy)

    def place(self, entry: Entry, *, is_free: bool) -> None:
        """Note an entry after a change; ``is_free``: this hub has a credit for it."""
        weight = entry.info.weight
        self._lightest = min(self._lightest, weight)
        lacks = entry.pickable and entry.gated and not is_free and not entry.clogged_until_s and weight > 0
        has_room = lacks and _load(entry) < entry.capacity
        _keep(self._near, entry, has_room and self._labels and entry.near)
        _keep(self._heavy, entry, has_room and self._weights and weight > self._lightest)

    def addrs(self) -> tuple[str, ...]:
        """Whom to ask for a credit, so that a pick need not make do with another."""
        return tuple(self._near or self._heavy)

    def room(self) -> int:
        """How many more those could run."""
        return sum(entry.capacity - _load(entry) for entry in (self._near or self._heavy).values())

    def has_better(self, chosen: Entry, avoid: Collection[str] = ()) -> bool:
        """Whether somebody who lacks only a credit should rather have the work that ``chosen`` has a credit for."""
        if self._labels and not chosen.near and any(_suits(entry, avoid) for entry in self._near.values()):
            return True
        return any(_suits(entry, avoid) and _outweighs(entry, chosen) for entry in self._heavy.values())


def _keep(entries: dict[str, Entry], entry: Entry, is_in: bool) -> None:
    if is_in:
        entries[entry.addr] = entry
    elif entries:
        entries.pop(entry.addr, None)


def _suits(entry: Entry, avoid: Collection[str]) -> bool:
    return entry.addr not in avoid and not entry.health.blocked


def _outweighs(entry: Entry, chosen: Entry) -> bool:
    if entry.info.weight <= chosen.info.weight or entry.near < chosen.near:
        return False
    return _load(entry) / (entry.capacity * entry.weight) < _load(chosen) / (chosen.capacity * chosen.weight)


def _load(entry: Entry) -> int:
    """What the replica has to do as far as this hub knows; nothing is guessed of other hubs."""
    own = len(entry.in_flight)
    return max(own, entry.reported + own - entry.then)


class PoolPlaces:
    """The indices that picks go by. PoolMembers says what the entries in them are worth."""

    def __init__(self, balancer: LoadBalancer, options: PoolOptions) -> None:
        self._options = options
        #: In order of registration.
        self._entries: dict[str, Entry] = {}
        #: By tier. Every entry is in the index that its ``tier`` names, in no other.
        self._indices: tuple[PoolIndex, ...] = (index_of(balancer),)
        if options.labels:
            self._indices += (index_of(balancer),)
        #: The only index, where no place is nearer than another.
        self._only = None if options.labels else self._indices[0]
        #: Whom picks would rather have than those in the indices.
        self.withheld = Withheld(labels=bool(options.labels), weights=isinstance(balancer, LeastLoadBalancer))
        #: How many entries are in an index: whether a pick finds somebody.
        self.free_count = 0
        #: How many have a free slot and are in no index, because they are spared.
        self.reserve_count = 0
        #: Counts the times that one got into an index or the reserve: without, nobody who waits can be served.
        self.opened = 0
        self._listed_count = 0
        self._pickable_count = 0
        #: The sum of the capacities of those who can take work.
        self.slots = 0
        #: Who gives credits, by address; the tuple is made when it is asked for.
        self._givers: dict[str, Entry] = {}
        self._giver_addrs: tuple[str, ...] | None = None
        #: Entries that are not FINE.
        self._spared: dict[str, Entry] = {}
        #: Since when somebody could be picked at every moment; None while nobody can.
        self._serving_since_s: float | None = None
        #: Ejections are not heeded: too few would be left.
        self.panics = False

    def _settle(self, entry: Entry) -> None:
        """Count and place an entry after a change of its record or its session."""
        listed = entry.registered or entry.held
        pickable = listed and entry.answers and entry.info.takes_new_work and not entry.refused
        if listed != entry.listed:
            entry.listed = listed
            self._listed_count += 1 if listed else -1
        if pickable != entry.pickable:
            entry.pickable = pickable
            self._pickable_count += 1 if pickable else -1
            if not self._pickable_count:
                self._serving_since_s = None
            self.slots += entry.capacity if pickable else -entry.capacity
        if (pickable and entry.gated) != (entry.addr in self._givers):
            self._giver_addrs = None
            if self._givers.pop(entry.addr, None) is None:
                self._givers[entry.addr] = entry
        self._judge()
        self._place(entry)

    def _judge(self) -> None:
        """Heed the ejections only while at least half of those listed are left."""
        left = self._pickable_count - sum(entry.pickable for entry in self._spared.values())
        panics = bool(self._spared) and 2 * left < self._listed_count
        if panics != self.panics:
            self.panics = panics
            for entry in self._spared.values():
                self._place(entry)

    def _place(self, entry: Entry) -> None:
        """Have the entry in the index where it belongs, with its load and weight of now."""
        is_free = entry.pickable and (entry.credits > 0 or not entry.gated) and not entry.clogged_until_s
        self.withheld.place(entry, is_free=is_free)
        spared = is_free and self._is_spared(entry)
        if spared != entry.in_reserve:
            entry.in_reserve = spared
            self.reserve_count += 1 if spared else -1
            self.opened += spared
        if not is_free or spared:
            tier = NOWHERE
        elif self._only is not None or (entry.near and (entry.gated or entry.load < entry.capacity)):
            tier = 0
        else:
            tier = 1
        before = entry.tier
        if tier == before:
            if tier != NOWHERE:
                self._indices[tier].update(entry)
            return
        entry.tier = tier
        if before != NOWHERE:
            self._indices[before].remove(entry)
            self.free_count -= 1
        if tier != NOWHERE:
            self._indices[tier].add(entry)
            self.free_count += 1
            self.opened += before == NOWHERE

    def _is_spared(self, entry: Entry) -> bool:
        return entry.health.blocked and not self.panics

    def _is_near(self, info: ReplicaInfo) -> bool:
        return all(info.labels.get(name) == value for name, value in self._options.labels.items())


#: A newcomer begins with this part of its weight.
_FIRST_PART: Final = 0.1
_RAMP_STEPS: Final = 20
#: One who weighs nothing is not picked at all; all others can be divided by.
_LEAST_WEIGHT: Final = 1e-6
#: The mean time of service is over about so many.
_MEAN_OF: Final = 20
#: A replica whose send queue was full is tried again after so long.
_CLOGGED_S: Final = 0.05


class PoolMembers(PoolPlaces):
    """Replicas by input address, and how each one does. PoolCore adds the picks."""

    def __init__(self, balancer: LoadBalancer, options: PoolOptions | None = None) -> None:
        super().__init__(balancer, options or PoolOptions())
        #: The entry by request. Each binding is also in that entry's ``in_flight``.
        self._bindings: dict[str, Entry] = {}
        self._hubs = 1
        #: Entries on their way to full weight.
        self._warming: dict[str, Entry] = {}
        self._warmed_at_s = 0.0
        #: Entries whose send queue was full a moment ago, the first to be tried again first.
        self._clogged: dict[str, Entry] = {}
        self.mean_service_s: float | None = None

    # ---- membership

    def upsert(self, info: ReplicaInfo, now_s: float) -> None:
        """The registry lists a replica. A report from a frame younger than ``load_fresh_s`` wins over the record's."""
        entry = self._entries.get(info.input_addr)
        if entry is None:
            entry = self._entries[info.input_addr] = Entry(info, self._is_near(info))
            entry.report(info.queue_length, self._hubs)
        else:
            if not entry.is_same_life(info):
                self._begin_anew(entry)
            entry.info, entry.registered, entry.held, entry.near = info, True, False, self._is_near(info)
            if entry.reported_at_s is None or now_s - entry.reported_at_s > self._options.load_fresh_s:
                entry.report(info.queue_length, self._hubs)
        if entry.pickable:
            self.slots += info.capacity - entry.capacity
        entry.capacity = info.capacity
        self._weigh(entry, now_s)
        self._settle(entry)
        if self._pickable_count and self._serving_since_s is None:
            self._serving_since_s = now_s

    def remove(self, addr: str) -> None:
        """The registry lists it no more: no picks. What is in flight there goes on. Unknown addresses are fine."""
        entry = self._entries.get(addr)
        if entry is not None:
            entry.registered = entry.held = False
            self._settle(entry)
            self._forget_if_idle(entry)

    def hold(self, addr: str) -> None:
        """The registry lists it no more, and is not believed: picks go on while it answers. Until upsert or remove."""
        entry = self._entries.get(addr)
        if entry is not None:
            entry.registered, entry.held = False, True
            self._settle(entry)

    def session_up(self, addr: str, now_s: float, *, gated: bool = False) -> None:
        """The replica answers; a gated one is picked as far as it grants credits."""
        entry = self._entries.get(addr)
        if entry is None:
            return
        entry.answers, entry.gated, entry.unusable = True, gated, ""
        entry.void_credits()
        if entry.first_up_s is None:
            entry.first_up_s = now_s
            if self._others_serve(now_s):
                entry.warm_at_s = now_s + self._options.slow_start_s
                self._warming[addr] = entry
        self._weigh(entry, now_s)
        self._settle(entry)
        if self._pickable_count and self._serving_since_s is None:
            self._serving_since_s = now_s

    def unusable(self, addr: str, why: str) -> None:
        """There can be no session with the replica as its record is."""
        entry = self._entries.get(addr)
        if entry is not None:
            entry.unusable = why

    def refuse(self, addr: str, why: str) -> None:
        """Keep picks off the replica for what it runs; with an empty ``why``, no more."""
        entry = self._entries.get(addr)
        if entry is not None and entry.refused != why:
            entry.refused = why
            self._settle(entry)

    def session_down(self, addr: str) -> None:
        """The replica does not answer: no picks, and its credits are void."""
        entry = self._entries.get(addr)
        if entry is not None:
            entry.answers = False
            entry.void_credits()
            self._settle(entry)

    # ---- load

    def report(self, addr: str, queue_length: int, now_s: float) -> None:
        """A frame told the replica's queue length."""
        entry = self._entries.get(addr)
        if entry is not None:
            entry.reported_at_s = now_s
            entry.report(queue_length, self._hubs)
            self._place(entry)

    def report_age_s(self, addr: str, now_s: float) -> float | None:
        """How old the last report of a frame is; None before the first."""
        entry = self._entries.get(addr)
        return None if entry is None or entry.reported_at_s is None else now_s - entry.reported_at_s

    def set_live_hubs(self, count: int) -> None:
        """So many hubs share the replicas: each is taken to send as much as this one."""
        count = max(1, count)
        if count != self._hubs:
            self._hubs = count
            for entry in self._entries.values():
                entry.reload(count)
                self._place(entry)

    # ---- outcomes

    def succeeded(self, addr: str, service_s: float | None, now_s: float) -> None:
        """A replica has served a request, in ``service_s`` if that is known."""
        if service_s is not None:
            mean_s = self.mean_service_s
            self.mean_service_s = service_s if mean_s is None else mean_s + (service_s - mean_s) / _MEAN_OF
        entry = self._entries.get(addr)
        if entry is None:
            return
        entry.health.succeeded()
        if entry.health.standing is Standing.PROBED:
            entry.health.recovered(now_s)
            del self._spared[addr]
            self._judge()
            self._place(entry)

    def failed(self, addr: str, now_s: float) -> None:
        """A request failed by the replica's fault: it did not answer, the transport broke, or its engine failed."""
        entry = self._entries.get(addr)
        if entry is None or not entry.health.failed() or entry.health.standing is Standing.EJECTED:
            return
        if addr not in self._spared and len(self._spared) >= most_ejected(self._listed_count):
            return
        entry.health.eject(now_s, self._options.ejection_min_s, self._options.ejection_max_s)
        self._spared[addr] = entry
        self._judge()
        self._place(entry)

    def standing(self, addr: str) -> Standing:
        """Whether a replica is spared for its failures."""
        entry = self._entries.get(addr)
        return Standing.FINE if entry is None else entry.health.standing

    def clogged(self, addr: str, now_s: float) -> None:
        """Nothing more goes into the queue to a replica: no picks, for a moment."""
        entry = self._entries.get(addr)
        if entry is not None:
            entry.clogged_until_s = now_s + _CLOGGED_S
            self._clogged.pop(addr, None)
            self._clogged[addr] = entry
            self._place(entry)

    # ---- time

    @property
    def next_review_s(self) -> float | None:
        """When ``review`` is due though nothing happens; None while time changes nothing."""
        moments = [entry.health.until_s for entry in self._spared.values() if entry.health.standing is Standing.EJECTED]
        moments += [entry.clogged_until_s for entry in self._clogged.values()]
        if self._warming:
            moments.append(self._warmed_at_s + self._options.slow_start_s / _RAMP_STEPS)
        return min(moments, default=None)

    def review(self, now_s: float) -> None:
        """Time has passed: newcomers weigh more, and those left out get another try."""
        for entry in self._spared.values():
            if entry.health.standing is Standing.EJECTED and entry.health.until_s <= now_s:
                entry.health.try_again()
                self._place(entry)
        for addr, entry in list(self._clogged.items()):
            if entry.clogged_until_s <= now_s:
                entry.clogged_until_s = 0.0
                del self._clogged[addr]
                self._place(entry)
        # Many reviews may come at once, one with each session.
        if now_s < self._warmed_at_s + self._options.slow_start_s / _RAMP_STEPS:
            return
        self._warmed_at_s = now_s
        for entry in list(self._warming.values()):
            self._weigh(entry, now_s)
            self._place(entry)

    def _others_serve(self, now_s: float) -> bool:
        """Whether somebody has served for as long as a newcomer takes: else the whole pool is new."""
        since_s, length_s = self._serving_since_s, self._options.slow_start_s
        return length_s > 0 and since_s is not None and now_s - since_s >= length_s

    def _weigh(self, entry: Entry, now_s: float) -> None:
        weight = max(entry.info.weight, _LEAST_WEIGHT)
        if entry.warm_at_s is not None:
            left = (entry.warm_at_s - now_s) / self._options.slow_start_s
            if left > 0:
                weight *= 1.0 - (1.0 - _FIRST_PART) * min(1.0, left)
            else:
                entry.warm_at_s = None
                self._warming.pop(entry.addr, None)
        entry.weight = weight

    def _begin_anew(self, entry: Entry) -> None:
        """Another process has taken the address: what the one before did says nothing about it."""
        entry.first_up_s = entry.reported_at_s = entry.warm_at_s = None
        entry.health = Health()
        self._warming.pop(entry.addr, None)
        self._spared.pop(entry.addr, None)

    def _forget_if_idle(self, entry: Entry) -> None:
        if not (entry.registered or entry.held or entry.in_flight):
            del self._entries[entry.addr]
            self._warming.pop(entry.addr, None)
            self._clogged.pop(entry.addr, None)
            if self._spared.pop(entry.addr, None) is not None:
                self._judge()
