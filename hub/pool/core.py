"""Pool: one stage as a hub sees it, with its replicas, the picks among them, their bindings and credits.

A pool has parts, each with rules of its own: ``Members`` (records and sessions), ``SlowStart`` (weights of newcomers),
``Outliers`` (ejection), ``Indices`` (what a pick chooses from), ``CreditRequester`` and ``WaitQueue`` (picks without a
free slot). Pool applies each event to the parts that it concerns, and serves the waiting picks after it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from math import nan
from typing import TYPE_CHECKING, Final

from hub.config import PoolOptions
from hub.pool.credits import CreditRequest, CreditRequester, CreditStarved
from hub.pool.entry import MEAN_OF, NO_TIER, Binding, BindingEnd, BindingState, Entry
from hub.pool.members import Members, SlowStart
from hub.pool.outliers import Health, Outliers, OutlierState
from hub.pool.silence import Silence
from hub.pool.snapshots import PickSnapshots, PoolSnapshot
from hub.pool.status import NO_FAILURES, StageStatus, Troubles, troubles_of, why_absent
from hub.pool.wait_queue import PendingPick, Waiter, WaitQueue
from omni_discovery.balancing.base import index_of
from omni_discovery.balancing.policies import LeastLoadBalancer

if TYPE_CHECKING:
    from omni_discovery.balancing.base import LoadBalancer, PoolIndex, Task
    from omni_discovery.records.schema import ReplicaInfo

#: A replica whose send queue was full is tried again after so long.
_SEND_QUEUE_PAUSE_S: Final = 0.05


class Indices:
    """The policy's indices that picks choose from: one, or one of local replicas and one of all others."""

    def __init__(self, balancer: LoadBalancer, options: PoolOptions, outliers: Outliers[Entry]) -> None:
        self._outliers = outliers
        #: By tier. Every entry is in the index that its ``tier`` names, in no other.
        self.tiers: tuple[PoolIndex, ...] = (index_of(balancer),)
        if options.labels:
            self.tiers += (index_of(balancer),)
        self._has_one = len(self.tiers) == 1
        #: Better replicas than those in the indices, but for a credit.
        self.starved = CreditStarved(labels=bool(options.labels), weights=isinstance(balancer, LeastLoadBalancer))
        #: How many entries are in an index: above 0 a pick finds a replica.
        self.free_count = 0
        #: How many have a free slot and are in no index, because they are ejected.
        self.ejected_free_count = 0
        #: Bumped whenever a replica becomes pickable; a waiting pick is retried only if this moved.
        self.pickable_version = 0

    def reindex(self, entry: Entry) -> None:
        """Put the entry into the index where it belongs, with its load and weight of now; call it after each change."""
        entry.row = None
        is_free = entry.pickable and (entry.credits > 0 or not entry.uses_credits) and not entry.send_queue_full_until_s
        if self.starved.is_active:
            self.starved.update(entry, is_free=is_free)
        is_ejected = is_free and entry.health.is_blocked and not self._outliers.panics
        if is_ejected != entry.ejected_free:
            entry.ejected_free = is_ejected
            self.ejected_free_count += 1 if is_ejected else -1
            self.pickable_version += is_ejected
        if not is_free or is_ejected:
            tier = NO_TIER
        elif self._has_one or (entry.is_local and (entry.uses_credits or entry.load < entry.capacity)):
            tier = 0
        else:
            tier = 1
        before = entry.tier
        if tier == before:
            if tier != NO_TIER:
                self.tiers[tier].update(entry)
            return
        # A third party's index may raise: until it has returned, the entry counts as being where it was.
        if before != NO_TIER:
            self.tiers[before].remove(entry)
            entry.tier = NO_TIER
            self.free_count -= 1
        if tier != NO_TIER:
            self.tiers[tier].add(entry)
            entry.tier = tier
            self.free_count += 1
            self.pickable_version += before == NO_TIER


class Pool:
    """The replicas of one stage by input address, and the bindings of requests to them.

    ``now_s`` is monotonic. Addresses and request ids that the pool does not know are fine wherever none is promised.
    """

    def __init__(self, stage_id: int, balancer: LoadBalancer, options: PoolOptions | None = None) -> None:
        options = options or PoolOptions()
        self.stage_id = stage_id
        self.members = Members(options)
        self.outliers: Outliers[Entry] = Outliers(options.ejection_min_s, options.ejection_max_s)
        self.slow_start = SlowStart(options.slow_start_s)
        self.indices = Indices(balancer, options, self.outliers)
        self.queue = WaitQueue(stage_id, self, options.pick_timeout_s)
        #: The requests that failed here since the stage last served one.
        self.streak = NO_FAILURES
        #: How long a request lately took at a replica; None before the first.
        self.mean_service_s: float | None = None
        self._requester = CreditRequester()
        #: Bindings by request id. Each is also in its entry's ``in_flight``.
        self._bindings: dict[str, Binding] = {}
        #: Entries whose send queue was full a moment ago.
        self._full: dict[str, Entry] = {}
        # For each pick and each release without a chain of look-ups.
        self._tiers, self._reindex, self._waiters = self.indices.tiers, self.indices.reindex, self.queue.waiters
        self._starved = self.indices.starved
        self._snapshots = PickSnapshots(self.members, self._tiers) if options.keeps_snapshots else None
        self._on_deadline: Callable[[float | None], None] = _ignore_deadline
        self._credit_wanted: Callable[[], None] = _ignore_demand
        #: The deadline that ``on_deadline`` was called with last; nan if it has to be called in any case.
        self._announced_s: float | None = nan

    def __repr__(self) -> str:
        parts = f"{self.members}, {len(self._bindings)} in flight, {self._waiters.count} waiting"
        return f"Pool(stage {self.stage_id}, {parts}, ejected: {len(self.outliers.ejected)})"

    def watch_pool(self, on_deadline: Callable[[float | None], None], credit_wanted: Callable[[], None]) -> None:
        """Have the pool call its driver, at once and whenever the answer changes.

        ``on_deadline`` gets the moment at which ``run_timers`` and ``credit_requests`` are due, monotonic; None while
        time changes nothing. ``credit_wanted`` says that ``credit_requests`` is due now.
        """
        self._on_deadline, self._credit_wanted = on_deadline, credit_wanted
        self._announced_s = nan
        self._announce()

    # ---- membership

    def upsert(self, info: ReplicaInfo, now_s: float) -> None:
        """The registry lists a replica, new or changed."""
        known = self.members.entries.get(info.input_addr)
        is_new = known is None or not known.is_same_process(info)
        if known is not None and is_new:
            # What the process before did says nothing about this one.
            known.first_up_s = known.reported_at_s = known.warm_at_s = None
            known.health, known.silence = Health(), Silence()
            known.down_since_s, known.down_reason = now_s, ""
            self.slow_start.forget(known.addr)
            self.outliers.forget(known.addr)
        if is_new or known is None or known.info.weight != info.weight:
            self._starved.note_weight(info.weight)
        entry = self.members.upsert(info, now_s)
        self.slow_start.weigh(entry, now_s)
        # Most records that come only bring another load.
        if self.members.recount(entry, now_s) or is_new or self._waiters.count:
            self._update(entry, now_s)
        else:
            self._reindex(entry)

    def remove(self, addr: str, now_s: float) -> None:
        """The registry lists the replica no more: no picks. What is in flight there goes on."""
        entry = self.members.entries.get(addr)
        if entry is not None:
            entry.registered = entry.held = False
            self._update(entry, now_s)
            self._drop_if_idle(entry)

    def hold(self, addr: str, now_s: float) -> None:
        """Keep picking a replica that is gone from the registry, while it answers: a mass loss is suspected.

        ``upsert`` or ``remove`` ends the hold.
        """
        entry = self.members.entries.get(addr)
        if entry is not None:
            entry.registered, entry.held = False, True
            self._update(entry, now_s)

    def session_up(self, addr: str, now_s: float, *, uses_credits: bool = False) -> None:
        """The replica answers on its data plane; one that uses credits is picked as far as it grants them."""
        entry = self.members.entries.get(addr)
        if entry is None:
            return
        entry.answers, entry.uses_credits, entry.unusable, entry.down_reason = True, uses_credits, "", ""
        entry.void_credits()
        if entry.first_up_s is None:
            # What others have failed says nothing about a new process.
            self.streak = NO_FAILURES
            self.slow_start.begin(entry, self.members.serving_since_s, now_s)
        self.slow_start.weigh(entry, now_s)
        self._update(entry, now_s)

    def session_down(self, addr: str, now_s: float, reason: str = "") -> None:
        """The replica does not answer: no picks, and its credits are void."""
        entry = self.members.entries.get(addr)
        if entry is not None:
            entry.lose_session(now_s, reason)
            entry.void_credits()
            self._update(entry, now_s)

    def unusable(self, addr: str, why: str) -> None:
        """There can be no session with the replica as its record is; only the status text changes."""
        entry = self.members.entries.get(addr)
        if entry is not None:
            entry.unusable = why

    def refuse(self, addr: str, why: str, now_s: float) -> None:
        """Keep picks off the replica for the deploy document that it runs; with an empty ``why`` no more."""
        entry = self.members.entries.get(addr)
        if entry is not None and entry.refused != why:
            entry.refused = why
            self._update(entry, now_s)

    def set_live_hubs(self, count: int) -> None:
        """So many hubs share the replicas, this one included: each is taken to send as much as this one."""
        count = max(1, count)
        if count != self.members.hubs:
            self.members.hubs = count
            for entry in self.members:
                entry.reload(count)
                self._reindex(entry)
            # The loads decide whether the best replicas lack only a credit, and so when credits are requested.
            self._announce()

    # ---- load and outcomes

    def report(self, addr: str, queue_length: int, now_s: float) -> None:
        """Store the queue length that a frame of the replica brought."""
        entry = self.members.entries.get(addr)
        if entry is not None:
            entry.reported_at_s = now_s
            entry.report(queue_length, self.members.hubs)
            self._reindex(entry)
            if self._waiters.count:
                self._serve()

    def succeeded(self, addr: str, service_s: float | None, now_s: float) -> bool:
        """A replica has served a request, in ``service_s`` if known; return whether that ends its ejection."""
        if service_s is not None:
            mean_s = self.mean_service_s
            self.mean_service_s = service_s if mean_s is None else mean_s + (service_s - mean_s) / MEAN_OF
        entry = self.members.entries.get(addr)
        if entry is not None and service_s is not None:
            entry.served_in(service_s, now_s)
        if entry is None or not self.outliers.succeeded(entry, now_s):
            return False
        self._heed_outliers()
        self._reindex(entry)
        self._changed()
        return True

    def failed(self, addr: str, now_s: float, cause: str = "", request_id: str = "") -> bool:
        """A request failed by the replica's fault: it did not answer, the transport broke, or its engine failed.

        Return whether that ejects the replica.
        """
        members = self.members
        entry = members.entries.get(addr)
        if entry is None:
            return False
        is_ejected = self.outliers.failed(entry, members.listed_count, now_s, cause, request_id, members)
        if is_ejected:
            self._heed_outliers()
            self._reindex(entry)
            self._changed()
        return is_ejected

    def withdraw_success(self, addr: str) -> None:
        """A request that a replica has served could not go on: the hand-off that it left can't be read."""
        entry = self.members.entries.get(addr)
        if entry is not None:
            entry.health.withdraw_success()

    def excuse(self, addr: str, request_id: str, now_s: float) -> bool:
        """Forget that a request failed at a replica, as it failed at another one, too; return whether that readmits."""
        entry = self.members.entries.get(addr)
        if entry is None:
            return False
        is_readmitted = self.outliers.excuse(entry, request_id, now_s)
        self._after_readmission([entry])
        return is_readmitted

    def readmit_ordinary(self, now_s: float) -> list[Entry]:
        """A replica has failed: readmit the ejected ones that fail no more than the others do, and return them."""
        readmitted = self.outliers.readmit_ordinary(self.members, now_s)
        if readmitted:
            self._after_readmission(readmitted)
        return readmitted

    def _after_readmission(self, entries: list[Entry]) -> None:
        self._heed_outliers()
        for entry in entries:
            self._reindex(entry)
        self._changed()

    def stage_served(self) -> None:
        """The stage has done its work for a request, at whatever replica."""
        if self.streak.count:
            self.streak = NO_FAILURES

    def stage_failed(self, kind: str, now_s: float) -> None:
        """A request ended with an error by the fault of this stage, after all retries; ``kind`` is the error's type."""
        self.streak = self.streak.extended(kind, now_s)

    def outlier_state(self, addr: str) -> OutlierState:
        """Whether a replica is ejected; FINE if it is unknown."""
        entry = self.members.entries.get(addr)
        return OutlierState.FINE if entry is None else entry.health.state

    def send_queue_full(self, addr: str, now_s: float) -> None:
        """No message fits into the send queue to a replica: no picks for 50 ms. The replica is not to blame."""
        entry = self.members.entries.get(addr)
        if entry is not None:
            entry.send_queue_full_until_s = now_s + _SEND_QUEUE_PAUSE_S
            self._full[addr] = entry
            self._reindex(entry)
            self._announce()

    # ---- credits

    def grant(self, addr: str, count: int) -> None:
        """The replica lets this hub send so many more requests."""
        entry = self.members.entries.get(addr)
        if entry is not None and entry.answers and entry.uses_credits and count > 0:
            entry.credits += count
            self._reindex(entry)
            if self._waiters.count:
                self._serve()

    def recall(self, addr: str, count: int) -> int:
        """Handle a replica's recall of ``count`` credits; return how many unspent ones are given back."""
        entry = self.members.entries.get(addr)
        if entry is None:
            return 0
        given_up = max(0, min(count, entry.credits))
        entry.credits -= given_up
        self._reindex(entry)
        if self._waiters.count:
            self._announce()
        return given_up

    def credit_replicas(self, *, with_ejected: bool = False) -> tuple[str, ...]:
        """The addresses that credit requests can go to; ``with_ejected``: for a pick that has no other replica left."""
        addrs = self.members.credit_addrs()
        if self.outliers.ejected and not with_ejected:
            replicas = self.members.credit_replicas
            return tuple(addr for addr in addrs if not self.outliers.is_ejected(replicas[addr]))
        return addrs

    def credit_requests(self, now_s: float) -> list[CreditRequest]:
        """The credit requests to send now; one with ``waiting`` 0 withdraws an earlier request."""
        waiting, hurry = self._waiters.count, self.queue.all_prefer_best
        if not self._requester.is_due(now_s, waiting, hurry=hurry):
            return []
        addrs = self._credit_addrs() if waiting else ()
        requests = self._requester.due(now_s, waiting, self._waiters.oldest_wait_s(now_s), addrs, hurry=hurry)
        self._announce()
        return requests

    @property
    def next_credit_request_s(self) -> float | None:
        """When ``credit_requests`` is due, monotonic: 0.0 is now, None is never while nothing changes."""
        waiting, has_asked = self._waiters.count, self._requester.has_asked
        if not (waiting or has_asked):
            return None
        replicas = 0 if has_asked else len(self._credit_addrs())
        return self._requester.next_s(waiting, replicas, hurry=self.queue.all_prefer_best)

    def _credit_addrs(self) -> tuple[str, ...]:
        if self.queue.all_prefer_best and self._waiters.count <= self._starved.free_slots():
            return self._starved.addrs()
        return self.credit_replicas(with_ejected=self.queue.needs_ejected)

    # ---- picking

    def pick(
        self,
        request_id: str,
        task: Task,
        affinity_request_id: str | None = None,
        avoid: Collection[str] = (),
        *,
        may_wait: bool = False,
    ) -> Binding | None:
        """Choose a replica and bind the request to it; None if no replica that is not in ``avoid`` has a free slot.

        First the replica that the request is bound to, then the one of ``affinity_request_id``, then the balancer's
        choice. One that ``may_wait`` gets None, too, while a better replica lacks only a credit of this hub.
        """
        if affinity_request_id is not None or request_id in self._bindings:
            binding = self._affine(request_id, affinity_request_id, avoid)
            if binding is not None:
                return binding
        chosen = self._choose(task, avoid) if avoid else self._choose_any(task)
        if chosen is None:
            return None
        if may_wait and self._starved.is_active and self._starved.has_better(chosen, avoid):
            chosen.row = None
            return None
        snapshots = self._snapshots
        snapshot = None if snapshots is None else snapshots.picked(chosen, self.indices.free_count, avoid)
        return self._bind(request_id, chosen, snapshot)

    def snapshot_of_wait(self, avoid: Collection[str] = ()) -> PoolSnapshot | None:
        """What the pool looks like to a pick that finds nobody; None where nobody keeps receipts."""
        return None if self._snapshots is None else self._snapshots.waits(self.indices.free_count, avoid)

    def try_pick(
        self, request_id: str, task: Task, affinity_request_id: str | None = None, avoid: Collection[str] = ()
    ) -> Binding | None:
        """As ``pick`` for a request that may wait. Raise StageUnavailableError if all replicas are to be avoided.

        A free slot can be taken whatever the priority: none of the picks that wait could use it.
        """
        binding = self.pick(request_id, task, affinity_request_id, avoid, may_wait=True)
        if binding is None and avoid and self.all_avoided(avoid):
            raise self.queue.all_avoided_error()
        return binding

    def wait(self, waiter: Waiter[PendingPick]) -> None:
        """Queue a pick that found no free slot; its token gets the binding or the error."""
        self.queue.add(waiter)
        self._announce()

    def withdraw(self, waiter: Waiter[PendingPick]) -> None:
        """Remove a pick from the queue. Idempotent."""
        if waiter.is_waiting:
            self._waiters.discard(waiter)
            self._announce()

    def stop_preferring(self, waiter: Waiter[PendingPick]) -> None:
        """Let a queued pick take any replica: it has waited long enough for the best."""
        self.queue.stop_preferring(waiter)
        self._announce()

    def time_out(self, waiter: Waiter[PendingPick], now_s: float) -> float | None:
        """See WaitQueue.time_out."""
        left_s = self.queue.time_out(waiter, now_s)
        self._announce()
        return left_s

    def all_avoided(self, avoid: Collection[str]) -> bool:
        """Whether some replica can take work, and every one that can is in ``avoid``."""
        count = self.members.pickable_count
        return bool(avoid and count) and self.members.serviceable_count(set(avoid)) == count

    def only_ejected_left(self, avoid: Collection[str]) -> bool:
        """Whether every replica that can take work is in ``avoid`` or ejected."""
        if not self.outliers.ejected:
            return False
        members = self.members
        return members.serviceable_count(set(avoid) | self.outliers.ejected.keys()) == members.pickable_count

    def has_free(self, avoid: Collection[str] = ()) -> bool:
        """Whether a pick that avoids these replicas would find a free slot at once."""
        entries = (self.members.entries.get(addr) for addr in set(avoid))
        return self.free_count > sum(entry is not None and entry.tier != NO_TIER for entry in entries)

    @property
    def healthy_addrs(self) -> frozenset[str]:
        """The replicas that can take work, full or not; those that are ejected count only if there are no others."""
        pickable = [entry for entry in self.members if entry.pickable]
        fine = frozenset(entry.addr for entry in pickable if not self.outliers.is_ejected(entry))
        return fine or frozenset(entry.addr for entry in pickable)

    def candidates(self, avoid: Collection[str] = ()) -> list[ReplicaInfo]:
        """The replicas with a free slot that are not in ``avoid``; ``queue_length`` is this hub's estimate of now."""
        return [
            replace(entry.info, queue_length=entry.load)
            for entry in self.members
            if entry.tier != NO_TIER and entry.addr not in avoid
        ]

    def _affine(self, request_id: str, affinity_request_id: str | None, avoid: Collection[str]) -> Binding | None:
        own = self._bindings.get(request_id)
        if own is not None:
            if own.entry.pickable and own.addr not in avoid:
                return own
            self._unbind(own, BindingEnd.DONE)
        other = None if affinity_request_id is None else self._bindings.get(affinity_request_id)
        if other is not None and other.entry.pickable and other.addr not in avoid:
            snapshots = self._snapshots
            snapshot = None if snapshots is None else snapshots.bound(other.entry, self.indices.free_count)
            return self._bind(request_id, other.entry, snapshot)
        return None

    def _choose_any(self, task: Task) -> Entry | None:
        """Pick from the indices."""
        if self._snapshots is not None and self.indices.free_count:
            self._snapshots.look(())
        for index in self._tiers:
            chosen = index.pick(task)
            if chosen is not None:
                return chosen  # type: ignore[return-value]
        return None

    def _choose(self, task: Task, avoid: Collection[str]) -> Entry | None:
        """Pick from the indices as if the replicas to avoid were not in them; then from the ejected ones."""
        entries, tiers = self.members.entries, self._tiers
        hidden = [entry for addr in set(avoid) if (entry := entries.get(addr)) is not None and entry.tier != NO_TIER]
        for entry in hidden:
            tiers[entry.tier].remove(entry)
        try:
            if self._snapshots is not None:
                self._snapshots.look(avoid)
            chosen = next((found for index in tiers if (found := index.pick(task)) is not None), None)
        finally:
            for entry in hidden:
                tiers[entry.tier].add(entry)
                entry.row = None
        return self._last_resort(avoid) if chosen is None else chosen  # type: ignore[return-value]

    def _last_resort(self, avoid: Collection[str]) -> Entry | None:
        """An ejected replica is better than none, but not where a better one is only full."""
        if not self.ejected_free_count or not self.only_ejected_left(avoid):
            return None
        ejected = self.outliers.ejected.items()
        return next((entry for addr, entry in ejected if entry.ejected_free and addr not in avoid), None)

    # ---- bindings

    def bind(self, request_id: str, addr: str) -> Binding:
        """Bind a request to the replica at an address; a former binding ends. Raise ValueError if there is none."""
        entry = self.members.entries.get(addr)
        if entry is None:
            raise ValueError(f"no replica has the address {addr!r}")
        binding = self._bindings.get(request_id)
        if binding is not None:
            if binding.entry is entry:
                return binding
            self._unbind(binding, BindingEnd.DONE)
        return self._bind(request_id, entry)

    def binding(self, request_id: str) -> Binding | None:
        """The request's binding; None if its work of this stage is at no replica."""
        return self._bindings.get(request_id)

    def bound(self, request_id: str) -> str | None:
        """The input address of the replica that a request is bound to; None if it is bound to none."""
        binding = self._bindings.get(request_id)
        return None if binding is None else binding.addr

    def release(self, request_id: str, end: BindingEnd = BindingEnd.DONE) -> str | None:
        """End a request's binding; return the address that it was bound to, None if it was bound to none."""
        binding = self._bindings.get(request_id)
        if binding is None:
            return None
        self.end_binding(binding, end)
        return binding.addr

    def end_binding(self, binding: Binding, end: BindingEnd) -> None:
        """Free a binding's slot and serve the waiting picks. For Binding.release, which calls it once."""
        self._unbind(binding, end)
        if self._waiters.count:
            self._serve()

    def invalidate(self, addr: str) -> list[str]:
        """End every binding to an address; return the ids of exactly the requests that had one."""
        entry = self.members.entries.get(addr)
        bindings = [] if entry is None else list(entry.in_flight.values())
        for binding in bindings:
            self._unbind(binding, BindingEnd.DONE)
        if self._waiters.count:
            self._serve()
        return [binding.request_id for binding in bindings]

    def _bind(self, request_id: str, entry: Entry, snapshot: PoolSnapshot | None = None) -> Binding:
        spends = entry.credits > 0 and entry.uses_credits
        if spends:
            entry.credits -= 1
        binding = Binding(self, request_id, entry, spends, snapshot)
        self._bindings[request_id] = entry.in_flight[request_id] = binding
        if entry.health.needs_probe:
            entry.health.start_probe(request_id)
        entry.reload(self.members.hubs)
        self._reindex(entry)
        return binding

    def _unbind(self, binding: Binding, end: BindingEnd) -> None:
        entry, request_id = binding.entry, binding.request_id
        del self._bindings[request_id], entry.in_flight[request_id]
        if binding.state is BindingState.ACCEPTED:
            entry.accepted -= 1
        binding.state = BindingState.RELEASED
        if binding.spent_credit and end is BindingEnd.UNSENT:
            entry.credits += 1
        if entry.health.probe == request_id:
            entry.health.cancel_probe()
        entry.reload(self.members.hubs)
        self._reindex(entry)
        if not entry.registered:
            self._drop_if_idle(entry)

    # ---- time

    @property
    def next_timer_s(self) -> float | None:
        """When ``run_timers`` is due, monotonic; None while time changes nothing."""
        moments_s = [entry.send_queue_full_until_s for entry in self._full.values()] if self._full else []
        if self.outliers.ejected and (end_s := self.outliers.next_end_s) is not None:
            moments_s.append(end_s)
        if (step_s := self.slow_start.next_step_s) is not None:
            moments_s.append(step_s)
        return min(moments_s, default=None)

    def run_timers(self, now_s: float) -> None:
        """Apply what time has changed: weights in slow start, ends of ejections, send queues to be tried again."""
        # The driver's timer has fired, perhaps too early: it has to be set again, even if an index raises here.
        self._announced_s = nan
        try:
            for entry in self.outliers.end_ejections(now_s):
                self._reindex(entry)
            for addr, entry in list(self._full.items()):
                if entry.send_queue_full_until_s <= now_s:
                    entry.send_queue_full_until_s = 0.0
                    del self._full[addr]
                    self._reindex(entry)
            for entry in self.slow_start.step(now_s):
                self._reindex(entry)
            if self._waiters.count:
                self.queue.recheck()
        finally:
            self._announce()

    # ---- what the queue needs

    @property
    def free_count(self) -> int:
        """How many replicas have a free slot and are in an index."""
        return self.indices.free_count

    @property
    def ejected_free_count(self) -> int:
        """How many replicas have a free slot and are ejected."""
        return self.indices.ejected_free_count

    @property
    def pickable_version(self) -> int:
        """Bumped whenever a replica becomes pickable."""
        return self.indices.pickable_version

    @property
    def unavailable_since_s(self) -> float | None:
        """Since when no replica can take work, monotonic; None while one can."""
        return self.members.unavailable_since_s

    @property
    def starved_slots(self) -> int | None:
        """How many slots the best replicas have that lack only a credit of this hub; None if there are no such."""
        return self._starved.free_slots() if self._starved else None

    # ---- status

    @property
    def usable_slots(self) -> int:
        """How many slots this hub uses, and may use at once as far as that is known: one of each replica."""
        return len(self._bindings) + self.indices.free_count

    @property
    def status(self) -> StageStatus:
        """The counts of replicas, and why those can't take work that can't."""
        members = self.members
        counts = members.registered_count, members.pickable_count
        return StageStatus(self.stage_id, *counts, self.why_absent(), self.streak)

    def why_absent(self) -> str:
        """Why the replicas that can't take work are not picked, as text; empty if every replica can."""
        return why_absent(self.members)

    def troubles(self, now_s: float, wall_s: float) -> Troubles:
        """The registered replicas that are ejected, or that don't answer though they are up, at this moment."""
        members = self.members
        if not self.outliers.ejected and members.pickable_count == members.listed_count:
            return Troubles([])
        return troubles_of(members, is_panic=self.outliers.panics, now_s=now_s, wall_s=wall_s)

    @property
    def is_unused(self) -> bool:
        """Whether the pool has neither a replica nor a waiting pick."""
        return not (self.members.entries or self._waiters.count)

    # ---- after a change

    def _update(self, entry: Entry, now_s: float) -> None:
        """Bring counts, panic and indices up to date after a change of an entry's record or session."""
        self.members.recount(entry, now_s)
        self._heed_outliers()
        self._reindex(entry)
        self._changed()

    def _heed_outliers(self) -> None:
        members = self.members
        if self.outliers.update_panic(members.pickable_count, members.listed_count):
            for entry in self.outliers.ejected.values():
                self._reindex(entry)

    def _drop_if_idle(self, entry: Entry) -> None:
        if self.members.drop_if_idle(entry):
            self.slow_start.forget(entry.addr)
            self._full.pop(entry.addr, None)
            if self.outliers.forget(entry.addr):
                self._heed_outliers()
            self._announce()

    def _changed(self) -> None:
        if self._waiters.count:
            self.queue.recheck()
        self._announce()

    def _serve(self) -> None:
        self.queue.serve()
        self._announce()

    def _announce(self) -> None:
        """Call the driver if its next call is due at another moment, or credit requests are due now."""
        moment_s, credit_s = self.next_timer_s, self.next_credit_request_s
        if credit_s == 0.0:
            self._credit_wanted()
        elif credit_s is not None:
            moment_s = credit_s if moment_s is None else min(moment_s, credit_s)
        if moment_s != self._announced_s:
            self._announced_s = moment_s
            self._on_deadline(moment_s)


def _ignore_deadline(_moment_s: float | None) -> None:
    """No driver watches the pool."""


def _ignore_demand() -> None:
    """No driver watches the pool."""
