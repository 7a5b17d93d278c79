"""The load balancers of the seeds: given a task and a list of replicas, they say which one."""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from enum import StrEnum
from math import inf
from typing import Any, Final, TypedDict

from omni_discovery.errors import ConfigError
from omni_discovery.messages import ReplicaInfo
from omni_discovery.pool_index import ListIndex, PoolIndex


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
        """Return what picks from one pool; here one that shows ``select`` the whole list."""
        return ListIndex(self)


class LoadBalancingPolicy(StrEnum):
    """The names of the policies, as users give them."""

    RANDOM = "random"
    ROUND_ROBIN = "round-robin"
    LEAST_QUEUE_LENGTH = "least-queue-length"


class RandomBalancer(LoadBalancer):
    """Any replica, each as likely as the next."""

    def select(self, task: Task, replicas: list[ReplicaInfo]) -> int:
        """See LoadBalancer."""
        _check_some(replicas)
        return random.randrange(len(replicas))


class RoundRobinBalancer(LoadBalancer):
    """One after the other, by position; a list that changes may skip or repeat a replica. Thread-safe."""

    def __init__(self, start_index: int = 0) -> None:
        self._lock = threading.Lock()
        #: The next position; read modulo the length of the list at hand. Guarded by ``_lock``.
        self._next_index = start_index

    def select(self, task: Task, replicas: list[ReplicaInfo]) -> int:
        """See LoadBalancer."""
        _check_some(replicas)
        count = len(replicas)
        with self._lock:
            index = self._next_index % count
            self._next_index = (index + 1) % count
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


def _check_some(replicas: list[ReplicaInfo]) -> None:
    if not replicas:
        raise ValueError("replicas must not be empty")


_FACTORIES: Final[Mapping[LoadBalancingPolicy, Callable[[], LoadBalancer]]] = {
    LoadBalancingPolicy.RANDOM: RandomBalancer,
    LoadBalancingPolicy.ROUND_ROBIN: RoundRobinBalancer,
    LoadBalancingPolicy.LEAST_QUEUE_LENGTH: LeastQueueLengthBalancer,
}


def build_load_balancer_factory(policy: str) -> Callable[[], LoadBalancer]:
    """Return what makes one balancer per stage for a policy's name. Raise ConfigError, a ValueError, for no policy."""
    try:
        return _FACTORIES[LoadBalancingPolicy(policy)]
    except ValueError:
        valid = ", ".join(known.value for known in LoadBalancingPolicy)
        raise ConfigError(f"unknown load balancing policy {policy!r}; valid are: {valid}") from None
