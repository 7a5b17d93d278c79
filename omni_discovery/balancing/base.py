"""The contract of load balancing policies: LoadBalancer is a policy, PoolIndex is a policy at work on one pool.

A third party's policy derives from LoadBalancer and defines ``select``. That shows it the whole list at each pick; one
that wants to be faster defines ``index`` as well. Pure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_discovery.records.schema import ReplicaInfo


class Task(TypedDict, total=False):
    """The request that a replica is chosen for; any part may be missing."""

    request_id: str
    engine_inputs: Any
    sampling_params: Any


class Member:
    """One replica of a pool. The pool changes it and then calls the index's ``update``.

    An index reads it and writes only ``index_state``, ``key`` and ``position``. These keep their values when the member
    is removed, because it may be added again.
    """

    __slots__ = ("addr", "capacity", "index_state", "info", "key", "load", "position", "reported", "weight")

    def __init__(self, info: ReplicaInfo, load: int | None = None) -> None:
        self.addr = info.input_addr
        self.info = info
        #: How many requests it runs at one time.
        self.capacity = info.capacity
        #: How much of ``info.weight`` counts now: less in a slow start. Above 0 for a member of an index.
        self.weight = info.weight
        #: The queue length that the replica reported last.
        self.reported = info.queue_length
        #: The hub's estimate of its queue length now.
        self.load = info.queue_length if load is None else load
        #: For the index alone.
        self.index_state: Any = None
        self.key = 0.0
        self.position = -1

    @property
    def place(self) -> Any:
        """The former name of ``index_state``, until 0.3."""
        return self.index_state

    @place.setter
    def place(self, value: Any) -> None:
        self.index_state = value

    @property
    def spot(self) -> int:
        """The former name of ``position``, until 0.3."""
        return self.position

    @spot.setter
    def spot(self, value: int) -> None:
        self.position = value


class PoolIndex(Protocol):
    """A policy at work on one pool. The pool calls it from one thread and never adds a member twice."""

    def add(self, member: Member) -> None:
        """The member may be picked from now on."""

    def update(self, member: Member) -> None:
        """The load, the report, the weight or the record of a member has changed."""

    def remove(self, member: Member) -> None:
        """The member may not be picked any more; it may be added again later."""

    def pick(self, task: Task) -> Member | None:
        """Choose a member; None if the index is empty. The pool counts the request by an ``update`` that follows."""


class Draws:
    """Chance that remembers what was drawn, so that a pick can be repeated; put in place of an index's ``chance``."""

    __slots__ = ("_chance", "drawn")

    def __init__(self, chance: Callable[[], float]) -> None:
        self._chance = chance
        #: What was drawn since somebody emptied it.
        self.drawn: list[float] = []

    def __call__(self) -> float:
        """Draw a number from 0 up to 1."""
        number = self._chance()
        self.drawn.append(number)
        return number


class LoadBalancer(ABC):
    """Chooses one of several replicas."""

    @abstractmethod
    def select(self, task: Task, replicas: list[ReplicaInfo]) -> int:
        """Return the list index of the chosen replica; don't change the list. Raise ValueError if it is empty."""

    def index(self) -> PoolIndex:
        """Return an index for one pool, which need not look at all replicas at each pick; here one that does."""
        return ListIndex(self)


class ListIndex:
    """For a policy that only has ``select``: shows it the list, ordered by replica id. A pick costs O(n)."""

    def __init__(self, balancer: LoadBalancer) -> None:
        self._balancer = balancer
        self._members: list[Member] = []

    def add(self, member: Member) -> None:
        """See PoolIndex."""
        member.index_state = None
        insort(self._members, member, key=_replica_id)

    def update(self, member: Member) -> None:
        """See PoolIndex."""
        member.index_state = None

    def remove(self, member: Member) -> None:
        """See PoolIndex."""
        self._members.remove(member)

    def pick(self, task: Task) -> Member | None:
        """See PoolIndex."""
        if not self._members:
            return None
        return self._members[self._balancer.select(task, [_current_info(member) for member in self._members])]


def index_of(balancer: LoadBalancer) -> PoolIndex:
    """The policy's index; a ListIndex where a derived class overrides ``select`` but not ``index``."""
    for kind in type(balancer).__mro__:
        if "index" in kind.__dict__:
            break
        if "select" in kind.__dict__:
            return ListIndex(balancer)
    return balancer.index()


def _replica_id(member: Member) -> int:
    return member.info.replica_id


def _current_info(member: Member) -> ReplicaInfo:
    """The record with load and weight of now; made once after each change of the member."""
    if member.index_state is None:
        member.index_state = replace(member.info, queue_length=member.load, weight=member.weight)
    info: ReplicaInfo = member.index_state
    return info
