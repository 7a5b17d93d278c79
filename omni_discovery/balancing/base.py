"""What a policy keeps about one pool, so that a pick need not look at every replica. Pure: chance comes in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

if TYPE_CHECKING:
    from omni_discovery.records.schema import ReplicaInfo


class Task(TypedDict, total=False):
    """What is known of a request when a replica is chosen; any part may be missing."""

    request_id: str
    engine_inputs: Any
    sampling_params: Any


class Member:
    """One replica of a pool. The pool changes it and then says so.

    An index reads it and writes only ``place``, ``key`` and ``spot``, which stay when the member is removed: it may
    come back.
    """

    __slots__ = ("addr", "capacity", "info", "key", "load", "place", "reported", "spot", "weight")

    def __init__(self, info: ReplicaInfo, load: int | None = None) -> None:
        self.addr = info.input_addr
        self.info = info
        self.capacity = info.capacity
        #: What counts of ``info.weight`` now: less while a newcomer warms up. Above 0 in an index.
        self.weight = info.weight
        #: The replica's own count of requests, newest known.
        self.reported = info.queue_length
        #: The hub's estimate of its requests now.
        self.load = info.queue_length if load is None else load
        #: What the index remembers of it.
        self.place: Any = None
        self.key = 0.0
        self.spot = -1


class PoolIndex(Protocol):
    """A policy at work on one pool. The pool calls it from one thread and never adds a member twice."""

    def add(self, member: Member) -> None:
        """The member may be picked from now on."""

    def update(self, member: Member) -> None:
        """The load, the report, the weight or the record of a member has changed."""

    def remove(self, member: Member) -> None:
        """The member may not be picked any more; it may be added again later."""

    def pick(self, task: Task) -> Member | None:
        """Choose a member; None if there is none. The pool counts the request by an update that follows."""


class LoadBalancer(ABC):
    """Chooses one of several replicas."""

    @abstractmethod
    def select(self, task: Task, replicas: list[ReplicaInfo]) -> int:
        """Return the index of the chosen replica; the list stays as it is. Raise ValueError if it is empty."""

    def index(self) -> PoolIndex:
        """Return what picks from one pool without looking at all of it; here one that shows ``select`` the list."""
        return ListIndex(self)


class ListIndex:
    """For a balancer that only knows ``select``: shows it the list, ordered by replica id. A pick costs O(n)."""

    def __init__(self, balancer: LoadBalancer) -> None:
        self._balancer = balancer
        self._members: list[Member] = []

    def add(self, member: Member) -> None:
        """See PoolIndex."""
        member.place = None
        insort(self._members, member, key=_replica_id)

    def update(self, member: Member) -> None:
        """See PoolIndex."""
        member.place = None

    def remove(self, member: Member) -> None:
        """See PoolIndex."""
        self._members.remove(member)

    def pick(self, task: Task) -> Member | None:
        """See PoolIndex."""
        if not self._members:
            return None
        return self._members[self._balancer.select(task, [_shown(member) for member in self._members])]


def index_of(balancer: LoadBalancer) -> PoolIndex:
    """The balancer's index, unless a derived class has a ``select`` of its own and says nothing of an index."""
    for kind in type(balancer).__mro__:
        if "index" in kind.__dict__:
            break
        if "select" in kind.__dict__:
            return ListIndex(balancer)
    return balancer.index()


def _replica_id(member: Member) -> int:
    return member.info.replica_id


def _shown(member: Member) -> ReplicaInfo:
    if member.place is None:
        member.place = replace(member.info, queue_length=member.load, weight=member.weight)
    shown: ReplicaInfo = member.place
    return shown
