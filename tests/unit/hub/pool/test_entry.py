"""Bindings: released once, whatever has become of the request since; and what entries look like in a debugger."""

from __future__ import annotations

from typing import Any

import pytest

from hub.config import PoolOptions
from hub.pool.core import Pool
from hub.pool.entry import Binding, BindingEnd, BindingState
from omni_discovery.balancing.policies import RoundRobinBalancer
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus

TASK: Any = {"request_id": "r"}


def pool_of(*names: str, credits_: int = 1) -> Pool:
    pool = Pool(3, RoundRobinBalancer(), PoolOptions())
    for number, name in enumerate(names):
        pool.upsert(ReplicaInfo(name, "", 3, ReplicaStatus.UP, 0, 0.0, 0.0, number, capacity=4), 0.0)
        pool.session_up(name, 0.0, uses_credits=True)
        pool.grant(name, credits_)
    return pool


def pick(pool: Pool, request_id: str) -> Binding:
    binding = pool.pick(request_id, TASK)
    assert binding is not None
    return binding


def test_a_binding_is_released_once() -> None:
    """1. r spends the only credit of a and is never sent: the credit can be spent again
    2. released again, nothing changes: there is no second credit
    """
    pool = pool_of("a")
    binding = pick(pool, "r")
    assert binding.spent_credit
    assert binding.release(BindingEnd.UNSENT)
    assert not binding.release(BindingEnd.UNSENT)
    assert binding.state is BindingState.RELEASED
    assert pool.members.credits("a") == 1


def test_a_released_binding_leaves_a_later_one_of_the_same_request_alone() -> None:
    pool = pool_of("a", "b")
    first = pick(pool, "r")
    assert first.release()
    second = pick(pool, "r")
    assert not first.release()
    assert pool.binding("r") is second
    assert second.state is BindingState.BOUND


def test_a_binding_is_accepted_once_and_never_after_its_release() -> None:
    pool = pool_of("a")
    binding = pick(pool, "r")
    binding.accept()
    binding.accept()
    assert (binding.state, binding.entry.accepted) == (BindingState.ACCEPTED, 1)
    binding.release()
    binding.accept()
    assert (binding.state, binding.entry.accepted) == (BindingState.RELEASED, 0)


def test_the_end_of_a_session_takes_the_credit_of_its_bindings() -> None:
    pool = pool_of("a")
    binding = pick(pool, "r")
    pool.session_down("a", 1.0)
    assert not binding.spent_credit
    binding.release(BindingEnd.UNSENT)
    assert pool.members.credits("a") == 0


def test_the_mean_service_time_is_that_of_all_requests_while_there_are_few() -> None:
    entry = pool_of("a").members.entries["a"]
    assert (entry.served, entry.mean_service_s) == (0, 0.0)
    for service_s in (2.0, 4.0, 9.0):
        entry.served_in(service_s, 7.0)
    assert entry.mean_service_s == pytest.approx(5.0)
    assert (entry.served, entry.served_at_s) == (3, 7.0)


def test_a_debugger_shows_what_matters() -> None:
    pool = pool_of("a", "b")
    binding = pick(pool, "r")
    assert repr(binding) == "Binding(r at a, BOUND, credit)"
    assert repr(binding.entry) == "Entry(a, pickable, FINE, load 1/4, 1 in flight, 0 credits)"
    assert repr(pool.members) == "Members(2 pickable of 2, 8 slots)"
    assert repr(pool) == "Pool(stage 3, Members(2 pickable of 2, 8 slots), 1 in flight, 0 waiting, ejected: 0)"
