"""Snapshots: what a pool looked like when it picked, for a receipt. Pure.

A snapshot is made for every pick, so it is one plain tuple of numbers and texts: cheap to make, cheap to keep, and
nothing that the garbage collector has to follow.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

from hub.pool.entry import NO_TIER, Entry
from hub.pool.status import cause_absent
from omni_discovery.balancing.base import Draws
from omni_discovery.receipts.receipt import BY_BINDING, BY_POLICY, LAST_RESORT, Candidate, Picking

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from hub.pool.members import Members
    from omni_discovery.balancing.base import PoolIndex

#: How many replicas a snapshot holds. A pick costs the same with thousands, and so must its snapshot.
MOST_ROWS: Final = 32

#: (replica id, epoch, load, reported, capacity, weight, credits or -1, tier, is local, is probed, why out, key): the
#: fields of a Candidate, in another order. An entry keeps its own until something of it changes.
ReplicaRow = tuple[int, int, int, int, int, float, int, int, bool, bool, str, float]
#: (how, chosen id or -1, its epoch, known, free, rows, draws, basis, places in the index by row; empty without draws)
PoolSnapshot = tuple[
    str, int, int, int, int, tuple[ReplicaRow, ...], tuple[float, ...], tuple[float, ...], tuple[int, ...]
]


class PickSnapshots:
    """Part of a pool: ``look`` before a policy picks, ``picked`` after it has."""

    def __init__(self, members: Members, tiers: Sequence[PoolIndex]) -> None:
        self._members = members
        self._entries = members.entries
        self._tiers = tiers
        self._rows: tuple[ReplicaRow, ...] = ()
        #: What the policy drew since the last look; all indices of the pool write to it.
        self._drawn: list[float] = []
        #: Where avoided replicas were not in the index: what it looked like without them.
        self._places: tuple[int, ...] = ()
        for index in tiers:
            # A third party's index has no chance that could be watched.
            if hasattr(index, "chance"):
                draws = index.chance = Draws(index.chance)
                draws.drawn = self._drawn

    def look(self, avoid: Collection[str]) -> None:
        """Keep what the pool looks like now; a policy is about to pick."""
        self._drawn.clear()
        self._rows = self._look(avoid)
        if avoid:
            self._places = self._look_up()

    def picked(self, chosen: Entry, free: int, avoid: Collection[str]) -> PoolSnapshot:
        """The snapshot of a pick by the policy; nothing has changed since."""
        info, rows, tier = chosen.info, self._rows, chosen.tier
        known, drawn = len(self._entries), self._drawn
        if known > MOST_ROWS and not any(row[0] == info.replica_id and row[1] == info.epoch for row in rows):
            rows = (*rows, row_of(chosen, avoid))
        places = (self._places if avoid else self._look_up()) if drawn else ()
        if tier == NO_TIER:
            return LAST_RESORT, info.replica_id, info.epoch, known, free, rows, (), (), ()
        basis = getattr(self._tiers[tier], "basis", ())
        return BY_POLICY, info.replica_id, info.epoch, known, free, rows, tuple(drawn), basis, places

    def bound(self, chosen: Entry, free: int) -> PoolSnapshot:
        """The snapshot of a request that goes where it was, or where its parent is."""
        known, info = len(self._entries), chosen.info
        return BY_BINDING, info.replica_id, info.epoch, known, free, (row_of(chosen, ()),), (), (), ()

    def waits(self, free: int, avoid: Collection[str]) -> PoolSnapshot:
        """The snapshot of a pick that found nobody."""
        return BY_POLICY, -1, 0, len(self._entries), free, self._look(avoid), (), (), ()

    def _look(self, avoid: Collection[str]) -> tuple[ReplicaRow, ...]:
        if avoid:
            return tuple([row_of(entry, avoid) for entry in self._first()])
        return tuple([entry.row or _kept_row(entry) for entry in self._first()])

    def _look_up(self) -> tuple[int, ...]:
        return tuple([entry.position for entry in self._first()])

    def _first(self) -> Iterable[Entry]:
        entries = self._entries.values()
        return entries if len(entries) <= MOST_ROWS else islice(entries, MOST_ROWS)


def _kept_row(entry: Entry) -> ReplicaRow:
    row = entry.row = row_of(entry, ())
    return row


def row_of(entry: Entry, avoid: Collection[str]) -> ReplicaRow:
    """One replica as it is now, for a pick that avoids some."""
    info, tier = entry.info, entry.tier
    return (
        info.replica_id,
        info.epoch,
        entry.load,
        entry.reported,
        entry.capacity,
        entry.weight,
        entry.credits if entry.uses_credits else -1,
        tier,
        entry.is_local,
        entry.health.needs_probe,
        "" if tier >= 0 and not avoid else why_out(entry, avoid),
        entry.key,
    )


def why_out(entry: Entry, avoid: Collection[str]) -> str:
    """Why a replica can't be picked for a request that avoids some; empty if it can."""
    if entry.addr in avoid:
        return "it has failed this request, or was late with it"
    if entry.tier != NO_TIER:
        return ""
    if not entry.listed:
        return "it is not registered any more"
    if not entry.pickable:
        return cause_absent(entry)
    if entry.health.is_blocked:
        return f"ejected: {entry.health.reason}"
    if entry.send_queue_full_until_s:
        return "its send queue is full"
    if entry.load >= entry.capacity:
        return "full: all its slots are taken"
    free = ", though it reports free slots" if entry.own_load() < entry.capacity else ""
    return f"without a credit of this hub{free}"


def picking_of(snapshot: PoolSnapshot, stage_id: int, policy: str) -> Picking:
    """The shown form of a snapshot; hosts and versions are not in it."""
    how, chosen, epoch, known, free, rows, draws, basis, places = snapshot
    candidates = [candidate_of(row, stage_id) for row in rows]
    if len(places) == len(rows):
        pairs = zip(candidates, places, strict=True)
        candidates = [msgspec.structs.replace(candidate, position=place) for candidate, place in pairs]
    return Picking(
        how=how,
        policy=policy,
        chosen="" if chosen < 0 else f"{stage_id}/{chosen}",
        chosen_epoch=epoch,
        known=known,
        free=free,
        candidates=candidates,
        # A binding asks nobody else.
        cut=0 if how == BY_BINDING else max(0, known - len(rows)),
        draws=list(draws),
        basis=list(basis),
    )


def candidate_of(row: ReplicaRow, stage_id: int) -> Candidate:
    """The shown form of one replica in a snapshot."""
    replica_id, epoch, load, reported, capacity, weight, credits_, tier, is_local, is_probed, out, key = row
    return Candidate(
        replica=f"{stage_id}/{replica_id}",
        epoch=epoch,
        load=load,
        reported=reported,
        capacity=capacity,
        weight=weight,
        credits=None if credits_ < 0 else credits_,
        tier=tier,
        is_local=is_local,
        is_probed=is_probed,
        out=out,
        key=key,
    )
