"""The policy keeps what pools rely on, and fills one replica after the other."""

from __future__ import annotations

from packed_policy import PackedBalancer

from omni_discovery import LoadBalancer
from omni_discovery.testing import BalancerContract, some_replicas


class TestPackedBalancer(BalancerContract):
    def make_balancer(self) -> LoadBalancer:
        return PackedBalancer()


def test_the_first_replica_is_filled_before_the_second_gets_anything() -> None:
    choose = PackedBalancer().select
    assert choose({}, some_replicas(0, 0, 0, capacity=2)) == 0
    assert choose({}, some_replicas(1, 0, 0, capacity=2)) == 0
    assert choose({}, some_replicas(2, 0, 0, capacity=2)) == 1
    assert choose({}, some_replicas(4, 3, 5, capacity=2)) == 1
