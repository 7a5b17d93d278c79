"""One stage as a hub sees it: picks, the bindings of requests to replicas, and the credits they spend. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from hub.pool.entry import ACCEPTED, CREDIT, NOWHERE, WAITED, Entry
from hub.pool.members import PoolMembers
from hub.pool.outliers import Standing
from hub.pool.status import why_absent
from omni_discovery.records.schema import ReplicaInfo

if TYPE_CHECKING:
    from omni_discovery.balancing.policies import Task


class PoolCore(PoolMembers):
    """Replicas of one stage by input address, and the bindings of requests to them."""

    # ---- credits

    def grant(self, addr: str, count: int) -> None:
        """The replica lets this hub send so many more."""
        entry = self._entries.get(addr)
        if entry is not None and entry.answers and entry.gated and count > 0:
            entry.credits += count
            self._place(entry)

    def recall(self, addr: str, count: int) -> int:
        """The replica wants credits back; return how many unspent ones are given up."""
        entry = self._entries.get(addr)
        if entry is None:
            return 0
        given_up = max(0, min(count, entry.credits))
        entry.credits -= given_up
        self._place(entry)
        return given_up

    def credits(self, addr: str) -> int:
        """How many unspent credits there are for a replica."""
        entry = self._entries.get(addr)
        return 0 if entry is None else entry.credits

    def spent_credit(self, request_id: str) -> bool:
        """Whether the request's binding spent a credit of the session that is still up."""
        entry = self._bindings.get(request_id)
        return entry is not None and bool(entry.in_flight[request_id] & CREDIT)

    def givers(self, *, with_spared: bool = False) -> tuple[str, ...]:
        """Who can be asked for credits that a pick could spend; ``with_spared``: for one who has nobody else left."""
        if self._giver_addrs is None:
            self._giver_addrs = tuple(self._givers)
        if self._spared and not with_spared:
            return tuple(addr for addr in self._giver_addrs if not self._is_spared(self._givers[addr]))
        return self._giver_addrs

    # ---- picking

    def pick(
        self,
        request_id: str,
        task: Task,
        affinity_request_id: str | None = None,
        avoid: Collection[str] = (),
        *,
        patient: bool = False,
    ) -> ReplicaInfo | None:
        """Choose and bind: where the request is, then where the other one is, then who has a free slot; else None.

        A ``patient`` one is not sent far, or to a lesser weight, while a better replica lacks only a credit of ours.
        """
        if affinity_request_id is not None or request_id in self._bindings:
            found = self._affine(request_id, affinity_request_id, avoid)
            if found is not None:
                return found.info
        chosen = self._choose(task, avoid) if avoid else self._from_indices(task)
        if chosen is None or (patient and self.withheld and self.withheld.has_better(chosen, avoid)):
            return None
        self._bind(request_id, chosen)
        return chosen.info

    def pick_waited(
        self,
        request_id: str,
        task: Task,
        affinity_request_id: str | None,
        avoid: Collection[str],
        *,
        patient: bool = False,
    ) -> ReplicaInfo | None:
        """As ``pick``, for one that has waited: ``waited`` knows its binding from a later one."""
        found = self.pick(request_id, task, affinity_request_id, avoid, patient=patient)
        if found is not None:
            self._bindings[request_id].in_flight[request_id] |= WAITED
        return found

    def waited(self, request_id: str) -> bool:
        """Whether the request's binding was made by ``pick_waited``."""
        entry = self._bindings.get(request_id)
        return entry is not None and bool(entry.in_flight[request_id] & WAITED)

    def all_avoided(self, avoid: Collection[str]) -> bool:
        """Whether somebody can take work, and everybody who can is in ``avoid``."""
        if not avoid or not self._pickable_count:
            return False
        return sum(self.serviceable(addr) for addr in set(avoid)) == self._pickable_count

    def has_free(self, avoid: Collection[str] = ()) -> bool:
        """Whether somebody who is not in ``avoid`` has a free slot."""
        entries = (self._entries.get(addr) for addr in set(avoid))
        return self.free_count > sum(entry is not None and entry.tier != NOWHERE for entry in entries)

    def candidates(self, avoid: Collection[str] = ()) -> list[ReplicaInfo]:
        """Who has a free slot and is not in ``avoid``; ``queue_length`` is this hub's estimate of now."""
        return [
            replace(entry.info, queue_length=entry.load)
            for addr, entry in self._entries.items()
            if entry.tier != NOWHERE and addr not in avoid
        ]

    def _affine(self, request_id: str, affinity_request_id: str | None, avoid: Collection[str]) -> Entry | None:
        for bound_id in (request_id, affinity_request_id):
            entry = self._bindings.get(bound_id) if bound_id is not None else None
            if entry is not None and entry.addr not in avoid and entry.pickable:
                if self._bindings.get(request_id) is not entry:
                    self.release(request_id)
                    self._bind(request_id, entry)
                return entry
        self.release(request_id)
        return None

    def _from_indices(self, task: Task) -> Entry | None:
        for index in self._indices:
            found = index.pick(task)
            if found is not None:
                return found  # type: ignore[return-value]
        return None

    def _choose(self, task: Task, avoid: Collection[str]) -> Entry | None:
        """Pick from the indices as if those to avoid were not in them; then from those who are spared."""
        hidden = [
            entry for addr in set(avoid) if (entry := self._entries.get(addr)) is not None and entry.tier != NOWHERE
        ]
        for entry in hidden:
            self._indices[entry.tier].remove(entry)
        try:
            chosen = self._from_indices(task)
        finally:
            for entry in hidden:
                self._indices[entry.tier].add(entry)
        return self._last_resort(avoid) if chosen is None else chosen

    def _last_resort(self, avoid: Collection[str]) -> Entry | None:
        """Rather one who is spared for its failures than nobody; not where somebody better is only full."""
        if not self.reserve_count or not self.only_spared(avoid):
            return None
        return next((entry for addr, entry in self._spared.items() if entry.in_reserve and addr not in avoid), None)

    def only_spared(self, avoid: Collection[str]) -> bool:
        """Whether of those who can take work nobody is left but who is in ``avoid`` or spared for its failures."""
        if not self._spared:
            return False
        return sum(self.serviceable(addr) for addr in set(avoid) | self._spared.keys()) == self._pickable_count

    # ---- bindings

    def bind(self, request_id: str, addr: str) -> None:
        """Work of the request is in flight at ``addr``; a former binding ends. Raise ValueError if nobody is there."""
        entry = self._entries.get(addr)
        if entry is None:
            raise ValueError(f"no replica has the address {addr!r}")
        if self._bindings.get(request_id) is not entry:
            self.release(request_id)
            self._bind(request_id, entry)

    def _bind(self, request_id: str, entry: Entry) -> None:
        flags = 0
        if entry.gated and entry.credits > 0:
            entry.credits -= 1
            flags = CREDIT
        self._bindings[request_id] = entry
        entry.in_flight[request_id] = flags
        if entry.health.standing is Standing.PROBED and entry.health.probe is None:
            entry.health.probe = request_id
        entry.reload(self._hubs)
        self._place(entry)

    def bound(self, request_id: str) -> str | None:
        """Where the request's work of this stage is."""
        entry = self._bindings.get(request_id)
        return None if entry is None else entry.addr

    def accepted(self, request_id: str) -> None:
        """The replica has the work: its reports count it from now on."""
        entry = self._bindings.get(request_id)
        if entry is not None:
            flags = entry.in_flight[request_id]
            if not flags & ACCEPTED:
                entry.in_flight[request_id] = flags | ACCEPTED
                entry.accepted += 1

    def release(self, request_id: str, *, unsent: bool = False) -> str | None:
        """The request's work of this stage is over; return where it was. Unknown requests are fine.

        With ``unsent`` the replica never heard of it: the credit that it spent is there again.
        """
        entry = self._bindings.pop(request_id, None)
        if entry is None:
            return None
        flags = entry.in_flight.pop(request_id)
        if flags & ACCEPTED:
            entry.accepted -= 1
        if unsent and flags & CREDIT:
            entry.credits += 1
        if entry.health.probe == request_id:
            entry.health.probe = None
        entry.reload(self._hubs)
        self._place(entry)
        if not entry.registered:
            self._forget_if_idle(entry)
        return entry.addr

    def invalidate(self, addr: str) -> list[str]:
        """End every binding to ``addr``; return exactly the requests that had one."""
        request_ids = self.in_flight(addr)
        for request_id in request_ids:
            self.release(request_id)
        return request_ids

    # ---- what is known

    def answers(self, addr: str) -> bool:
        """Whether the replica at that address answers, listed or not."""
        entry = self._entries.get(addr)
        return entry is not None and entry.answers

    def serviceable(self, addr: str) -> bool:
        """Whether the replica at that address can take work."""
        entry = self._entries.get(addr)
        return entry is not None and entry.pickable

    def get(self, addr: str) -> ReplicaInfo | None:
        """The replica at that address, as last heard of."""
        entry = self._entries.get(addr)
        return None if entry is None else entry.info

    def in_flight(self, addr: str) -> list[str]:
        """The requests whose work is at ``addr``."""
        entry = self._entries.get(addr)
        return [] if entry is None else list(entry.in_flight)

    @property
    def is_populated(self) -> bool:
        """Whether it knows of any replica."""
        return bool(self._entries)

    def registered_count(self) -> int:
        """How many replicas the registry lists."""
        return sum(entry.registered for entry in self._entries.values())

    def held_count(self) -> int:
        """How many are served though the registry lists them no more."""
        return sum(entry.held for entry in self._entries.values())

    def ejected_count(self) -> int:
        """How many are left out for their failures, or just tried again."""
        return len(self._spared)

    def pickable_count(self) -> int:
        """How many can take work."""
        return self._pickable_count

    def why_absent(self) -> str:
        """What keeps those back that can't take work; empty if nothing does."""
        return why_absent(self._entries.values())
