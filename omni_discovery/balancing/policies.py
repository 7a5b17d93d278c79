"""The policies by which a replica is chosen, and how they go by name; third parties add theirs by entry points."""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from enum import StrEnum
from importlib.metadata import EntryPoint
from math import inf
from typing import Any, Final, TypedDict

from omni_discovery.balancing.base import ListIndex, Member, PoolIndex
from omni_discovery.balancing.prefix import PrefixIndex
from omni_discovery.balancing.weighted import (
    KeyedIndex,
    StrideIndex,
    TwoChoicesIndex,
    nothing,
    per_capacity,
    reported_per_weight,
)
from omni_discovery.errors import ConfigError
from omni_discovery.plugins import POLICY_GROUPS, find_plugins
from omni_discovery.records.schema import ReplicaInfo


class Task(TypedDict, total=False):
    """What is known of a request when a replica is chosen; any part may be missing."""

    request_id: str
    engine_inputs: Any
    sampling_params: Any


class LoadBalancer(ABC):
    """Chooses one of several replicas."""

    @abstractmethod
    def select(self, task: Task, replicas: list[ReplicaInfo]) -> int:
        """Return the index of the chosen replica; the list stays as it is. Raise ValueError if it is empty."""

    def index(self) -> PoolIndex:
        """Return what picks from one pool without looking at all of it; here one that shows ``select`` the list."""
        return ListIndex(self)


def index_of(balancer: LoadBalancer) -> PoolIndex:
    """The balancer's index, unless a derived class has a ``select`` of its own and says nothing of an index."""
    for kind in type(balancer).__mro__:
        if "index" in kind.__dict__:
            break
        if "select" in kind.__dict__:
            return ListIndex(balancer)
    return balancer.index()


class LoadBalancingPolicy(StrEnum):
    """The names of the policies, as users give them."""

    RANDOM = "random"
    ROUND_ROBIN = "round-robin"
    LEAST_QUEUE_LENGTH = "least-queue-length"
    LEAST_LOAD = "least-load"
    POWER_OF_TWO = "power-of-two"
    PREFIX_HASH = "prefix-hash"


#: What picks go by where nobody says otherwise.
DEFAULT_POLICY: Final = LoadBalancingPolicy.LEAST_LOAD


class RandomBalancer(LoadBalancer):
    """Any replica, each as likely as its weight."""

    def select(self, task: Task, replicas: list[ReplicaInfo]) -> int:
        """See LoadBalancer."""
        _check_some(replicas)
        weights = [replica.weight for replica in replicas]
        if min(weights) == max(weights):
            return random.randrange(len(replicas))
        return random.choices(range(len(replicas)), weights)[0]

    def index(self) -> PoolIndex:
        """See LoadBalancer."""
        return KeyedIndex(nothing, random.random)


class RoundRobinBalancer(LoadBalancer):
    """One after the other, as often as it weighs. Thread-safe.

    Of a list it goes by position, and one that changes may skip or repeat a replica; of a pool by replica id.
    """

    def __init__(self, start_index: int = 0) -> None:
        self._lock = threading.Lock()
        self._start_index = start_index
        #: The next position; read modulo the length of the list at hand. Guarded by ``_lock``.
        self._next_index = start_index
        #: When each replica's turn is, by input address, where weights differ. Guarded by ``_lock``.
        self._turns: dict[str, float] = {}

    def select(self, task: Task, replicas: list[ReplicaInfo]) -> int:
        """See LoadBalancer."""
        _check_some(replicas)
        count = len(replicas)
        with self._lock:
            if len({replica.weight for replica in replicas}) > 1:
                return self._by_turns(replicas)
            index = self._next_index % count
            self._next_index = (index + 1) % count
        return index

    def index(self) -> PoolIndex:
        """See LoadBalancer."""
        return StrideIndex(self._start_index)

    def _by_turns(self, replicas: list[ReplicaInfo]) -> int:
        now = min((self._turns.get(replica.input_addr, inf) for replica in replicas), default=0.0)
        now = 0.0 if now == inf else now
        self._turns = {replica.input_addr: self._turns.get(replica.input_addr, now) for replica in replicas}
        turns = [self._turns[replica.input_addr] if replica.weight > 0 else inf for replica in replicas]
        index = turns.index(min(turns))
        self._turns[replicas[index].input_addr] += 1.0 / replicas[index].weight
        return index


class LeastQueueLengthBalancer(LoadBalancer):
    """The shortest reported queue for its weight; among equals any, each as likely as its weight.

    All replicas weigh 1 unless an operator says otherwise: then it is the shortest queue, and all equals are alike.
    """

    def select(self, task: Task, replicas: list[ReplicaInfo]) -> int:
        """See LoadBalancer. Raise ValueError also if any queue length is negative."""
        _check_some(replicas)
        lengths = [replica.queue_length for replica in replicas]
        shortest = min(lengths)
        if shortest < 0:
            raise ValueError(f"queue_length must not be negative, but {replicas[lengths.index(shortest)]} says so")
        weights = [replica.weight for replica in replicas]
        # Nobody is left out when all weigh nothing: a list holds only those that may be chosen.
        if not any(weights):
            weights = [1.0] * len(weights)
        loads = [length / weight if weight > 0 else inf for length, weight in zip(lengths, weights, strict=True)]
        least = min(loads)
        equals = [index for index, load in enumerate(loads) if load == least]
        return random.choices(equals, [weights[index] or 1.0 for index in equals])[0]

    def index(self) -> PoolIndex:
        """See LoadBalancer."""
        return KeyedIndex(reported_per_weight, random.random)


class _IndexedBalancer(LoadBalancer):
    """A policy that is written as an index; a list is put into one first."""

    def select(self, task: Task, replicas: list[ReplicaInfo]) -> int:
        """See LoadBalancer."""
        _check_some(replicas)
        some_weigh = any(replica.weight > 0 for replica in replicas)
        index, positions = self.index(), dict[Member, int]()
        for position, replica in enumerate(replicas):
            member = Member(replica)
            if not some_weigh:
                member.weight = 1.0
            if member.weight > 0:
                positions[member] = position
                index.add(member)
        chosen = index.pick(task)
        if chosen is None:
            raise ValueError("replicas must not be empty")
        return positions[chosen]


class LeastLoadBalancer(_IndexedBalancer):
    """The least estimated load for capacity and weight; among equals any, each as likely as its weight."""

    def index(self) -> PoolIndex:
        """See LoadBalancer."""
        return KeyedIndex(per_capacity, random.random)


class PowerOfTwoBalancer(_IndexedBalancer):
    """Of two replicas drawn by weight the one with the lesser estimated load for capacity and weight."""

    def index(self) -> PoolIndex:
        """See LoadBalancer."""
        return TwoChoicesIndex(random.random)


class PrefixHashBalancer(_IndexedBalancer):
    """Prompts with the same leading blocks to the same replica, for its cache, unless that is overloaded."""

    def index(self) -> PoolIndex:
        """See LoadBalancer."""
        return PrefixIndex(random.random)


def _check_some(replicas: list[ReplicaInfo]) -> None:
    if not replicas:
        raise ValueError("replicas must not be empty")


_FACTORIES: Final[Mapping[LoadBalancingPolicy, Callable[[], LoadBalancer]]] = {
    LoadBalancingPolicy.RANDOM: RandomBalancer,
    LoadBalancingPolicy.ROUND_ROBIN: RoundRobinBalancer,
    LoadBalancingPolicy.LEAST_QUEUE_LENGTH: LeastQueueLengthBalancer,
    LoadBalancingPolicy.LEAST_LOAD: LeastLoadBalancer,
    LoadBalancingPolicy.POWER_OF_TWO: PowerOfTwoBalancer,
    LoadBalancingPolicy.PREFIX_HASH: PrefixHashBalancer,
}


def build_load_balancer_factory(policy: str) -> Callable[[], LoadBalancer]:
    """Return what makes one balancer per stage for a policy's name.

    Raise ConfigError, a ValueError, for no policy and for one of a third party that does not work.
    """
    try:
        return _FACTORIES[LoadBalancingPolicy(policy)]
    except ValueError:
        pass
    third_party = find_plugins(POLICY_GROUPS)
    if policy in third_party:
        return _load(third_party[policy])
    valid = ", ".join([*(known.value for known in LoadBalancingPolicy), *sorted(third_party)])
    raise ConfigError(f"unknown load balancing policy {policy!r}; valid are: {valid}")


def _load(point: EntryPoint) -> Callable[[], LoadBalancer]:
    try:
        factory: Any = point.load()
        made = factory()
    except Exception as error:
        raise ConfigError(f"the load balancing policy {point.name!r} ({point.value}) is broken: {error!r}") from error
    if not isinstance(made, LoadBalancer):
        raise ConfigError(
            f"the load balancing policy {point.name!r} ({point.value}) is broken: it returns a"
            f" {type(made).__name__}, not a LoadBalancer"
        )
    checked: Callable[[], LoadBalancer] = factory
    return checked
