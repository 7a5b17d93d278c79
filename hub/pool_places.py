"""Where each replica of one stage stands: who may be picked, and in which index. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hub.pool_entry import NOWHERE, Entry
from hub.pool_withheld import Withheld
from omni_discovery.balancing.policies import LeastLoadBalancer, index_of

if TYPE_CHECKING:
    from hub.pool_options import PoolOptions
    from omni_discovery.balancing.base import PoolIndex
    from omni_discovery.balancing.policies import LoadBalancer
    from omni_discovery.records.schema import ReplicaInfo


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
