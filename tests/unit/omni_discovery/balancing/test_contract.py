"""The contract of policies, asked of each of ours; and that it finds the policies that break it."""

from __future__ import annotations

import random

import pytest

from omni_discovery.balancing.base import ListIndex, Member, PoolIndex
from omni_discovery.balancing.policies import (
    LoadBalancer,
    LoadBalancingPolicy,
    RandomBalancer,
    Task,
    build_load_balancer_factory,
)
from omni_discovery.records.schema import ReplicaInfo
from omni_discovery.testing import BalancerContract


@pytest.fixture(params=list(LoadBalancingPolicy))
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestOurs(BalancerContract):
    most_reads_per_pick = 60

    @pytest.fixture(autouse=True)
    def _policy(self, policy: str) -> None:
        self.policy = policy

    def make_balancer(self) -> LoadBalancer:
        return build_load_balancer_factory(self.policy)()


class First(LoadBalancer):
    """The first, whatever it weighs; nothing of a task is read."""

    def select(self, task: Task, replicas: list[ReplicaInfo]) -> int:
        return 0


class Sorting(RandomBalancer):
    """It sorts the hub's own list."""

    def select(self, task: Task, replicas: list[ReplicaInfo]) -> int:
        replicas.sort(key=lambda info: info.queue_length)
        return super().select(task, replicas)


class Demanding(RandomBalancer):
    """It wants a prompt."""

    def select(self, task: Task, replicas: list[ReplicaInfo]) -> int:
        return len(str(task["engine_inputs"]["prompt"])) % len(replicas)


class Slow(RandomBalancer):
    """It looks at all of them."""

    def index(self) -> PoolIndex:
        return ListIndex(self)


class _Clinging(ListIndex):
    """It remembers the last that it has picked."""

    last: Member | None = None

    def pick(self, task: Task) -> Member | None:
        if self.last is None or random.random() < 0.2:
            self.last = super().pick(task)
        return self.last


class Clinging(RandomBalancer):
    """It picks who was removed."""

    def index(self) -> PoolIndex:
        return _Clinging(self)


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (First, "test_no_replica_can_be_chosen_from_an_empty_list"),
        (First, "test_a_replica_that_weighs_nothing_is_not_chosen_beside_one_that_does"),
        (Sorting, "test_select_returns_a_position_and_leaves_the_list_as_it_is"),
        (Demanding, "test_any_part_of_the_task_may_be_missing"),
        (Slow, "test_a_pick_costs_what_was_promised"),
        (Clinging, "test_the_index_follows_a_pool_that_changes"),
    ],
)
def test_the_contract_finds_a_policy_that_breaks_it(kind: type[LoadBalancer], test: str) -> None:
    class Broken(BalancerContract):
        most_reads_per_pick = 60

        def make_balancer(self) -> LoadBalancer:
            return kind()

    with pytest.raises((AssertionError, KeyError)):
        getattr(Broken(), test)()
