"""The built-in load balancing policies, and the lookup of a policy by name, third parties' policies included."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from enum import StrEnum
from importlib.metadata import EntryPoint
from math import inf
from typing import Any, Final

from omni_discovery.balancing.base import LoadBalancer, Member, PoolIndex, Task
from omni_discovery.balancing.prefix import PrefixIndex
from omni_discovery.balancing.weighted import (
    KeyedIndex,
    StrideIndex,
    TwoChoicesIndex,
    no_key,
    per_capacity,
    reported_per_weight,
)
from omni_discovery.errors import ConfigError
from omni_discovery.plugins import POLICY_GROUPS, find_plugins
from omni_discovery.records.schema import ReplicaInfo

#: LoadBalancer and Task were defined here before 0.2, and are imported from here by third parties.
__all__ = [
    "DEFAULT_POLICY",
    "LeastLoadBalancer",
    "LeastQueueLengthBalancer",
    "LoadBalancer",
    "LoadBalancingPolicy",
    "PowerOfTwoBalancer",
    "PrefixHashBalancer",
    "RandomBalancer",
    "RoundRobinBalancer",
    "Task",
    "build_load_balancer_factory",
]


class LoadBalancingPolicy(StrEnum):
    """The names of the built-in policies, as users write them."""

    RANDOM = "random"
    ROUND_ROBIN = "round-robin"
    LEAST_QUEUE_LENGTH = "least-queue-length"
    LEAST_LOAD = "least-load"
    POWER_OF_TWO = "power-of-two"
    PREFIX_HASH = "prefix-hash"


#: The policy of a hub without the flag.
DEFAULT_POLICY: Final = LoadBalancingPolicy.LEAST_LOAD


class RandomBalancer(LoadBalancer):
    """Any replica at random, with a probability proportional to its weight."""

    def select(self, task: Task, replicas: list[ReplicaInfo]) -> int:
        """See LoadBalancer."""
        _check_not_empty(replicas)
        weights = [replica.weight for replica in replicas]
        if min(weights) == max(weights):
            return random.randrange(len(replicas))
        return random.choices(range(len(replicas)), weights)[0]

    def index(self) -> PoolIndex:
        """See LoadBalancer."""
        return KeyedIndex(no_key, random.random)


class RoundRobinBalancer(LoadBalancer):
    """One replica after the other, in proportion to their weights. Thread-safe.

    ``select`` goes by position, so that a list that changes may skip or repeat a replica; in a pool it goes by id.
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
        _check_not_empty(replicas)
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
    """The least reported queue length divided by weight; among equals at random by weight.

    All replicas weigh 1 unless an operator changes that: then it is the shortest queue.
    """

    def select(self, task: Task, replicas: list[ReplicaInfo]) -> int:
        """See LoadBalancer. Raise ValueError also if any queue length is negative."""
        _check_not_empty(replicas)
        lengths = [replica.queue_length for replica in replicas]
        shortest = min(lengths)
        if shortest < 0:
            wrong = replicas[lengths.index(shortest)]
            # A record that was built by hand may have no id.
            name = wrong.input_addr if wrong.replica_id < 0 else f"{wrong.stage_id}/{wrong.replica_id}"
            raise ValueError(f"queue_length must be non-negative: replica {name} says {shortest}")
        weights = [replica.weight for replica in replicas]
        # A list holds only replicas that may be chosen: where all weigh 0 they are alike.
        if not any(weights):
            weights = [1.0] * len(weights)
        loads = [length / weight if weight > 0 else inf for length, weight in zip(lengths, weights, strict=True)]
        least = min(loads)
        equals = [index for index, load in enumerate(loads) if load == least]
        return random.choices(equals, [weights[index] for index in equals])[0]

    def index(self) -> PoolIndex:
        """See LoadBalancer."""
        return KeyedIndex(reported_per_weight, random.random)


class _IndexedBalancer(LoadBalancer):
    """A policy that is defined by its index; ``select`` puts the list into one first."""

    def select(self, task: Task, replicas: list[ReplicaInfo]) -> int:
        """See LoadBalancer."""
        _check_not_empty(replicas)
        has_weights = any(replica.weight > 0 for replica in replicas)
        index, positions = self.index(), dict[Member, int]()
        for position, replica in enumerate(replicas):
            member = Member(replica)
            if not has_weights:
                member.weight = 1.0
            if member.weight > 0:
                positions[member] = position
                index.add(member)
        chosen = index.pick(task)
        if chosen is None:
            raise ValueError("replicas must not be empty")
        return positions[chosen]


class LeastLoadBalancer(_IndexedBalancer):
    """The least estimated load divided by capacity and weight; among equals at random by weight."""

    def index(self) -> PoolIndex:
        """See LoadBalancer."""
        return KeyedIndex(per_capacity, random.random)


class PowerOfTwoBalancer(_IndexedBalancer):
    """Of two replicas drawn by weight the one with the lesser estimated load divided by capacity and weight."""

    def index(self) -> PoolIndex:
        """See LoadBalancer."""
        return TwoChoicesIndex(random.random)


class PrefixHashBalancer(_IndexedBalancer):
    """Prompts with the same leading blocks go to the same replica, for its prefix cache, unless it is overloaded."""

    def index(self) -> PoolIndex:
        """See LoadBalancer."""
        return PrefixIndex(random.random)


def _check_not_empty(replicas: list[ReplicaInfo]) -> None:
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
    """Return a factory of LoadBalancers, of which each pool needs its own, for a policy's name.

    Raise ConfigError, a ValueError, for an unknown name and for a third party's policy that can't be loaded.
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
        balancer = factory()
    except Exception as error:
        raise ConfigError(f"the load balancing policy {point.name!r} ({point.value}) is broken: {error!r}") from error
    if not isinstance(balancer, LoadBalancer):
        raise ConfigError(
            f"the load balancing policy {point.name!r} ({point.value}) is broken: it returns a"
            f" {type(balancer).__name__}, not a LoadBalancer"
        )
    checked: Callable[[], LoadBalancer] = factory
    return checked
