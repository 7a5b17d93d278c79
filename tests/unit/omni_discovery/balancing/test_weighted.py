"""Every index after any sequence of changes and picks agrees with a model that looks at all replicas."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_discovery.balancing.base import Member, PoolIndex, index_of
from omni_discovery.balancing.policies import LoadBalancingPolicy, RandomBalancer, build_load_balancer_factory
from omni_discovery.balancing.weighted import (
    KeyedIndex,
    StrideIndex,
    TwoChoicesIndex,
    no_key,
    per_capacity,
    reported_per_weight,
)
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus

TASK: Any = {"request_id": "r"}


def member(replica_id: int, weight: float = 1.0, capacity: int = 1) -> Member:
    return Member(
        ReplicaInfo(
            f"in{replica_id}", "", 0, ReplicaStatus.UP, 0, 0.0, 0.0, replica_id, weight=weight, capacity=capacity
        )
    )


def filled(index: PoolIndex, *members: Member) -> PoolIndex:
    for each in members:
        index.add(each)
    return index


_ids = st.integers(0, 5)
_steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["add", "remove", "pick"]), _ids, st.sampled_from([0, 1])),
        st.tuples(st.sampled_from(["load", "report"]), _ids, st.integers(0, 4)),
        st.tuples(st.just("weight"), _ids, st.sampled_from([0.1, 0.5, 1, 1.5, 3])),
    ),
    max_size=80,
)


def made(number: int) -> Member:
    return member(number, capacity=1 + number % 2)


def run_beside_a_model(index: PoolIndex, steps: list[tuple[str, int, float]], allowed: Any) -> None:
    members = {number: made(number) for number in range(6)}
    inside: dict[int, Member] = {}
    for verb, number, value in [*steps, ("pick", 0, 0)]:
        each = members[number]
        if verb == "add" and number not in inside:
            inside[number] = each
            index.add(each)
        elif verb == "remove" and number in inside:
            del inside[number]
            index.remove(each)
            if value:
                members[number] = made(number)
        elif verb == "pick":
            picked = index.pick(TASK)
            assert (picked is None) == (not inside)
            if picked is not None:
                assert picked in inside.values()
                assert allowed(picked, list(inside.values()))
                picked.load += 1
                index.update(picked)
        elif verb in ("load", "report", "weight"):
            name = {"load": "load", "report": "reported", "weight": "weight"}[verb]
            setattr(each, name, value)
            if number in inside:
                index.update(each)


@given(_steps, st.integers())
def test_least_load_and_least_queue_always_pick_one_of_the_least(steps: list[Any], seed: int) -> None:
    for key in (per_capacity, reported_per_weight, no_key):
        run_beside_a_model(
            KeyedIndex(key, random.Random(seed).random),
            steps,
            lambda picked, inside, key=key: key(picked) == min(map(key, inside)),
        )


@given(_steps)
def test_every_policy_picks_somebody_who_is_there_and_nobody_only_if_nobody_is(steps: list[Any]) -> None:
    for policy in LoadBalancingPolicy:
        run_beside_a_model(build_load_balancer_factory(policy)().index(), steps, lambda *_: True)


_comings = st.lists(st.tuples(st.sampled_from(["add", "remove", "pick", "pick"]), _ids), max_size=80)


@given(_comings, st.sampled_from([1.0, 0.25]))
def test_round_robin_with_equal_weights_takes_the_next_id_that_is_there(steps: list[Any], weight: float) -> None:
    """Whoever comes or goes: the id after the last one, or the first; as long as no one is in for a second turn."""
    index, members = StrideIndex(), {number: member(number, weight) for number in range(6)}
    inside: set[int] = set()
    last = -1
    had: set[int] = set()
    for verb, number in steps:
        if verb == "add" and number not in inside:
            inside.add(number)
            index.add(members[number])
        elif verb == "remove" and number in inside:
            inside.discard(number)
            index.remove(members[number])
        elif verb == "pick" and inside:
            expected = min((each for each in inside if each > last), default=None)
            if expected is None:
                had.clear()
                expected = min(inside)
            picked = index.pick(TASK)
            assert picked is not None
            assert picked.info.replica_id == expected
            assert expected not in had
            had.add(expected)
            last = expected


def test_round_robin_gives_turns_by_weight_and_spreads_them() -> None:
    index = filled(StrideIndex(), member(0, 1.0), member(1, 2.0), member(2, 0.5))
    picks = [index.pick(TASK) for _ in range(700)]
    ids = [picked.info.replica_id for picked in picks if picked is not None]
    counts = Counter(ids)
    assert [abs(counts[number] - share) <= 1 for number, share in enumerate((200, 400, 100))] == [True] * 3
    assert max(ids[start : start + 7].count(1) for start in range(690)) <= 5


def test_round_robin_takes_another_life_of_the_same_replica_for_another_one() -> None:
    """The address is the same and its turn, too; the one that is gone is still in the heap."""
    index, gone, back = filled(StrideIndex(), member(0), member(1)), member(2), member(2)
    index.add(gone)
    index.remove(gone)
    index.add(back)
    assert [index.pick(TASK) is back for _ in range(4)] == [False, False, True, False]


def test_round_robin_starts_where_told() -> None:
    """Statement 10, of a pool."""
    index = filled(StrideIndex(start_index=5), member(0), member(1), member(2))
    assert [index.pick(TASK).info.replica_id for _ in range(4)] == [2, 0, 1, 2]  # type: ignore[union-attr]


def test_who_comes_and_goes_without_end_leaves_nothing_behind() -> None:
    index, steady, flapping = StrideIndex(), member(0), member(1)
    keyed, one, other = KeyedIndex(per_capacity, random.random), member(2), member(3)
    filled(keyed, one, other)
    index.add(steady)
    for number in range(2000):
        index.add(flapping)
        index.remove(flapping)
        other.load = number
        keyed.update(other)
    assert len(index._heap) < 100
    assert len(keyed._groups[1].keys) < 100


@pytest.mark.parametrize("policy", ["least-load", "least-queue-length", "random"])
def test_statement_14_equals_are_drawn_evenly_however_they_became_equal(policy: str) -> None:
    """A replica that has just become idle is no likelier than one that has been for long."""
    index = build_load_balancer_factory(policy)().index()
    members = [member(number) for number in range(3)]
    filled(index, *members)
    counts: Counter[int] = Counter()
    for _ in range(3000):
        picked = index.pick(TASK)
        assert picked is not None
        counts[picked.info.replica_id] += 1
        picked.load = picked.reported = 1
        index.update(picked)
        picked.load = picked.reported = 0
        index.update(picked)
    assert min(counts.values()) > 850


@pytest.mark.parametrize("policy", ["least-load", "least-queue-length", "random", "power-of-two"])
def test_idle_replicas_are_picked_about_as_often_as_they_weigh(policy: str) -> None:
    index = filled(build_load_balancer_factory(policy)().index(), member(0, 1.0), member(1, 0.1), member(2, 1.0))
    counts = Counter(index.pick(TASK).info.replica_id for _ in range(3000))  # type: ignore[union-attr]
    assert 60 < counts[1] < 320
    assert counts[0] > 1200


def test_weights_of_many_magnitudes_are_drawn_exactly() -> None:
    weights = (0.001, 0.3, 0.7, 1.0, 1.9, 900.0)
    index = filled(KeyedIndex(no_key, random.Random(1).random), *map(member, range(6), weights))
    counts = Counter(index.pick(TASK).info.replica_id for _ in range(90_000))  # type: ignore[union-attr]
    for number, weight in enumerate(weights[1:], start=1):
        expected = 90_000 * weight / sum(weights)
        assert abs(counts[number] - expected) < 5 * expected**0.5 + 5


def test_power_of_two_never_takes_the_most_loaded_of_all() -> None:
    members = [member(number) for number in range(5)]
    members[3].load = 7
    index = filled(build_load_balancer_factory("power-of-two")().index(), *members)
    picked = {index.pick(TASK).info.replica_id for _ in range(500)}  # type: ignore[union-attr]
    assert picked == {0, 1, 2, 4}


def test_power_of_two_draws_by_weight_also_among_weights_of_one_magnitude() -> None:
    """Two idle replicas of weights 1 and 1.5: both are drawn each time, and the one drawn first is taken."""
    index = filled(TwoChoicesIndex(random.Random(7).random), member(0), member(1, weight=1.5))
    picked = Counter(chosen.info.replica_id for _ in range(4000) if (chosen := index.pick(TASK)) is not None)
    assert picked.total() == 4000
    assert 1.35 < picked[1] / picked[0] < 1.65


def test_load_counts_for_capacity() -> None:
    """Three of eight slots are less than one of two."""
    big, small = member(0, capacity=8), member(1, capacity=2)
    big.load, small.load = 3, 1
    index = filled(build_load_balancer_factory("least-load")().index(), big, small)
    assert index.pick(TASK) is big


class Second(RandomBalancer):
    """Knows no index of its own, though what it derives from does."""

    def select(self, task: Any, replicas: list[ReplicaInfo]) -> int:
        return 1


def test_a_select_of_ones_own_is_obeyed_by_pools_too() -> None:
    """It is shown the list by replica id, with the load of now."""
    first, second, third = (member(number) for number in range(3))
    index = filled(index_of(Second()), third, first, second)
    assert index.pick(TASK) is second
    index.remove(second)
    assert index.pick(TASK) is third
    shown: list[list[ReplicaInfo]] = []

    class Looks(Second):
        def select(self, task: Any, replicas: list[ReplicaInfo]) -> int:
            shown.append(replicas)
            return 0

    index = filled(index_of(Looks()), first, third)
    first.load = 4
    index.update(first)
    assert index.pick(TASK) is first
    assert shown == [[replace(first.info, queue_length=4), third.info]]


def test_equals_of_one_weight_are_picked_at_random_all_of_them() -> None:
    members = [member(number) for number in range(4)]
    index = filled(KeyedIndex(no_key, random.Random(1).random), *members)
    assert {index.pick(TASK) for _ in range(100)} == set(members)


def test_a_member_keeps_in_mind_the_turn_that_it_was_given() -> None:
    index, one, late = StrideIndex(), member(1), member(0, weight=0.25)
    index.add(one)
    index.pick(TASK)
    index.add(late)
    assert late.key == 4.0
