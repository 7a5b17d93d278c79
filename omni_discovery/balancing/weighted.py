"""Indices that draw by weight: the least key, the better of two at random, or in turn; ``chance`` comes in. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from math import frexp, inf, ldexp, nan
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from omni_discovery.balancing.base import Member, Task

    _Turn = tuple[float, int, str, int, Member]

_DRAWS: Final = 8
_BY_GROUPS: Final = (1.0,)


class _Group:
    """Members whose weights are within a factor of two, in buckets by key; the keys in a heap.

    The key of a bucket that has run empty stays in the heap until it is the least.
    """

    __slots__ = ("bound", "buckets", "count", "keys", "weight")

    def __init__(self, weight: float) -> None:
        #: The power of two above every weight.
        self.bound = ldexp(1.0, frexp(weight)[1])
        self.buckets: dict[float, list[Member]] = {}
        self.keys: list[float] = []
        self.count = 0
        #: The weight of every member; nan once they differ.
        self.weight = weight

    def insert(self, member: Member, key: float) -> None:
        bucket = self.buckets.get(key)
        if bucket is None:
            self.buckets[key] = [member]
            member.position = 0
            heappush(self.keys, key)
            if len(self.keys) > 2 * self.count + 64:
                self.drop_empty()
        else:
            member.position = len(bucket)
            bucket.append(member)
        member.key = key

    def discard(self, member: Member) -> None:
        bucket = self.buckets[member.key]
        last = bucket.pop()
        if last is not member:
            bucket[member.position] = last
            last.position = member.position

    def least(self) -> float:
        """The least key of a member; there must be one."""
        keys, buckets = self.keys, self.buckets
        while not buckets[keys[0]]:
            del buckets[heappop(keys)]
        return keys[0]

    def drop_empty(self) -> None:
        self.buckets = {key: bucket for key, bucket in self.buckets.items() if bucket}
        self.keys = list(self.buckets)
        heapify(self.keys)


class KeyedIndex:
    """Picks the least key; among equals at random by weight. O(log n).

    Weights are grouped by powers of two. A member is drawn evenly from its group and accepted with the probability of
    its weight divided by the group's bound, which is never below a half.
    """

    def __init__(self, key: Callable[[Member], float], chance: Callable[[], float]) -> None:
        self._key = key
        #: Numbers from 0 up to 1; whoever keeps receipts puts one here that remembers them.
        self.chance = chance
        #: By the exponent of the weight, in ascending order. No group is empty.
        self._groups: dict[int, _Group] = {}
        #: The group, if there is exactly one.
        self._only: _Group | None = None
        #: What the last pick went by beside members and draws: (1.0,) where members were drawn as if weights differed.
        self.basis: tuple[float, ...] = ()

    def add(self, member: Member) -> None:
        """See PoolIndex."""
        exponent = frexp(member.weight)[1]
        group = self._groups.get(exponent)
        if group is None:
            group = self._groups[exponent] = _Group(member.weight)
            self._groups = dict(sorted(self._groups.items()))
            self._only = group if len(self._groups) == 1 else None
        elif group.weight != member.weight:
            group.weight = nan
        group.count += 1
        member.index_state = group
        group.insert(member, self._key(member))

    def update(self, member: Member) -> None:
        """See PoolIndex."""
        group: _Group = member.index_state
        if group.weight != member.weight:
            self.remove(member)
            self.add(member)
            return
        key = self._key(member)
        if key != member.key:
            group.discard(member)
            group.insert(member, key)

    def remove(self, member: Member) -> None:
        """See PoolIndex."""
        group: _Group = member.index_state
        group.discard(member)
        group.count -= 1
        if not group.count:
            self._groups = {exponent: left for exponent, left in self._groups.items() if left is not group}
            self._only = next(iter(self._groups.values())) if len(self._groups) == 1 else None

    def restore_basis(self, basis: tuple[float, ...]) -> None:
        """Have the next pick go by the ``basis`` of another index with the same members."""
        if basis:
            for group in self._groups.values():
                group.weight = nan

    def pick(self, task: Task) -> Member | None:
        """See PoolIndex."""
        group = self._only
        if group is None:
            return self._from_groups() if self._groups else None
        bucket = group.buckets[group.keys[0]] or group.buckets[group.least()]
        if group.weight == group.weight:
            self.basis = ()
            return bucket[int(self.chance() * len(bucket))] if len(bucket) > 1 else bucket[0]
        return self._from_groups()

    def _from_groups(self) -> Member:
        self.basis = _BY_GROUPS
        least, total = inf, 0.0
        equals: list[tuple[list[Member], float]] = []
        bounds: list[float] = []
        for group in self._groups.values():
            key = group.keys[0] if group.buckets[group.keys[0]] else group.least()
            if key < least:
                least, total, equals, bounds = key, 0.0, [], []
            if key == least:
                bucket = group.buckets[key]
                total += len(bucket) * group.bound
                bounds.append(total)
                equals.append((bucket, group.bound))
        chance = self.chance
        while True:
            bucket, bound = equals[bisect_right(bounds, chance() * total)]
            member = bucket[int(chance() * len(bucket))]
            if chance() * bound < member.weight:
                return member


def per_capacity(member: Member) -> float:
    """The estimated load, divided by capacity and weight."""
    return member.load / (member.capacity * member.weight)


def reported_per_weight(member: Member) -> float:
    """The reported queue length, divided by weight."""
    return member.reported / member.weight


def no_key(_: Member) -> float:
    """The same key for all members."""
    return 0.0


class TwoChoicesIndex(KeyedIndex):
    """Draws two by weight and takes the one with the lesser estimated load. O(1)."""

    def __init__(self, chance: Callable[[], float]) -> None:
        super().__init__(no_key, chance)

    def pick(self, task: Task) -> Member | None:
        """See PoolIndex."""
        group = self._only
        if group is None or group.weight != group.weight:
            return self._pick_weighted(task)
        self.basis = ()
        members = group.buckets[0.0]
        count = len(members)
        if count == 1:
            return members[0]
        position = int(self.chance() * count)
        first = members[position]
        other = int(self.chance() * (count - 1))
        second = members[other + (other >= position)]
        return second if second.load * first.capacity < first.load * second.capacity else first

    def _pick_weighted(self, task: Task) -> Member | None:
        first = super().pick(task)
        if first is None:
            return None
        for _ in range(_DRAWS):
            second = super().pick(task)
            if second is not None and second is not first:
                return second if per_capacity(second) < per_capacity(first) else first
        return first


class StrideIndex:
    """One member after the other by replica id; one of twice the weight has its turn twice as often. O(log n).

    The ``key`` of a member is the moment of its turn.
    """

    def __init__(self, start_index: int = 0) -> None:
        self._start_index = start_index
        #: Turns: (moment, replica id, address, number, member). A turn that is not its member's ``index_state`` is
        #: void. The number differs between void and valid turns of one address, so that members are never compared.
        self._heap: list[_Turn] = []
        self._count = 0
        self._number = 0
        #: The turn that was taken last.
        self._last: tuple[float, int, str] = (0.0, -(1 << 62), "")

    def restore_turn(self, member: Member, moment: float) -> None:
        """Have ``add`` give the member this turn, its ``key`` in another index. Nothing was picked yet."""
        member.key, member.index_state = moment, self

    def add(self, member: Member) -> None:
        """See PoolIndex. A member that is added again keeps its turn, if that is not over."""
        moment, name = self._last[0], (member.info.replica_id, member.addr)
        if name <= self._last[1:]:
            moment += 1.0 / member.weight
        if member.index_state is self:
            moment = max(moment, member.key)
        member.key = moment
        self._number += 1
        turn = (moment, *name, self._number, member)
        member.index_state = turn
        self._count += 1
        heappush(self._heap, turn)
        if len(self._heap) > 2 * self._count + 64:
            self._heap = [turn for turn in self._heap if turn[4].index_state is turn]
            heapify(self._heap)

    def update(self, member: Member) -> None:
        """See PoolIndex. A new weight counts from the next turn on."""

    def remove(self, member: Member) -> None:
        """See PoolIndex."""
        member.index_state = self
        self._count -= 1

    def pick(self, task: Task) -> Member | None:
        """See PoolIndex."""
        if not self._count:
            return None
        if self._start_index:
            skipped, self._start_index = self._start_index % self._count, 0
            for _ in range(skipped):
                self.pick(task)
        heap = self._heap
        while heap[0][4].index_state is not heap[0]:
            heappop(heap)
        turn: _Turn = heap[0]
        moment, replica_id, addr, number, member = turn
        following = (moment + 1.0 / member.weight, replica_id, addr, number, member)
        member.index_state, member.key = following, following[0]
        heapreplace(heap, following)
        self._last = moment, replica_id, addr
        return member
