"""The replicas of one stage: who is listed, who answers, who may be picked, and how loaded each one is. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hub.outliers import Health, Standing, most_ejected
from hub.pool_entry import Entry
from hub.pool_options import PoolOptions
from hub.pool_places import PoolPlaces
from omni_discovery.records.schema import ReplicaInfo

if TYPE_CHECKING:
    from omni_discovery.balancing.policies import LoadBalancer

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
