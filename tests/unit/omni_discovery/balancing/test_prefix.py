"""Equal prefixes go to the same replica, as long as it isn't overloaded, whoever else comes or goes."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from omni_discovery.balancing.base import Member
from omni_discovery.balancing.prefix import PrefixIndex, _points, prefix_hash
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus


def member(replica_id: int, addr: str = "", weight: float = 1.0) -> Member:
    addr = addr or f"tcp://host{replica_id}:1"
    return Member(ReplicaInfo(addr, "", 0, ReplicaStatus.UP, 0, 0.0, 0.0, replica_id, weight=weight))


def index_of(*members: Member) -> PrefixIndex:
    index = PrefixIndex(random.Random(1).random)
    for each in members:
        index.add(each)
    return index


def task(prompt: str, request_id: str = "r") -> Any:
    return {"request_id": request_id, "engine_inputs": {"prompt": prompt}}


TASKS = [task(f"conversation {number}: " + "tell me about it " * 20) for number in range(2000)]


def owners(index: PrefixIndex) -> list[int]:
    return [index.pick(each).info.replica_id for each in TASKS]  # type: ignore[union-attr]


def test_equal_prefixes_go_to_the_same_replica_and_others_are_spread() -> None:
    index = index_of(*(member(number) for number in range(8)))
    first = owners(index)
    assert owners(index) == first
    assert set(first) == set(range(8))
    assert max(Counter(first).values()) < 3 * len(TASKS) / 8


def test_two_hubs_and_a_restarted_replica_agree() -> None:
    """The order of arrival and the addresses don't matter: the id does."""
    one = index_of(*(member(number) for number in range(8)))
    other = index_of(*(member(number, f"tcp://moved{number}:9") for number in reversed(range(8))))
    assert owners(one) == owners(other)


def test_who_leaves_moves_its_own_prefixes_only_and_who_comes_back_gets_them_back() -> None:
    members = [member(number) for number in range(8)]
    index = index_of(*members)
    before = owners(index)
    index.remove(members[3])
    after = owners(index)
    assert all(now == then for now, then in zip(after, before, strict=True) if then != 3)
    assert 3 not in after
    index.add(members[3])
    assert owners(index) == before


def test_who_joins_takes_about_its_share_and_moves_nothing_else() -> None:
    index = index_of(*(member(number) for number in range(8)))
    before = owners(index)
    index.add(member(8))
    moved = [now for now, then in zip(owners(index), before, strict=True) if now != then]
    assert set(moved) == {8}
    assert len(TASKS) / 40 < len(moved) < len(TASKS) / 4


def test_nobody_gets_more_than_a_quarter_above_its_share() -> None:
    """All have the same prompt: the bound alone spreads them."""
    members = [member(number) for number in range(10)]
    index, same = index_of(*members), task("the same " * 50)
    for _ in range(400):
        picked = index.pick(same)
        assert picked is not None
        picked.load += 1
        index.update(picked)
    assert sum(each.load for each in members) == 400
    assert max(each.load for each in members) <= 51


def test_weights_move_the_bound() -> None:
    heavy, light = member(0), member(1, weight=0.25)
    index, same = index_of(heavy, light), task("the same " * 50)
    for _ in range(100):
        picked = index.pick(same)
        assert picked is not None
        picked.load += 1
        index.update(picked)
    assert light.load <= 26


def test_somebody_is_found_though_nearly_all_are_away() -> None:
    members = [member(number) for number in range(300)]
    index = index_of(*members)
    owners(index)
    for each in members[1:]:
        index.remove(each)
    assert set(owners(index)) == {0}
    index.remove(members[0])
    assert index.pick(TASKS[0]) is None


def test_a_ring_forgets_those_who_never_came_back() -> None:
    index = index_of()
    for number in range(200):
        each = member(number)
        index.add(each)
        index.pick(TASKS[0])
        index.remove(each)
    assert len(index._owners) < 20 * 48


LONG = "You are a helpful assistant. " * 60


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"prompt": LONG + "What is an owl?"}, {"prompt": LONG + "What is a goose?"}),
        ({"prompt_token_ids": [*range(256), 7]}, {"prompt_token_ids": [*range(256), 8, 9]}),
        ({"prompt_token_ids": [*range(40)]}, {"prompt_token_ids": [*range(35)]}),
        (
            {"messages": [{"role": "user", "content": "Hello"}]},
            {
                "messages": [
                    {"role": "user", "content": "Hello"},
                    {"role": "assistant", "content": "Good morning."},
                    {"role": "user", "content": "Is it?"},
                ]
            },
        ),
    ],
)
def test_what_shares_its_leading_blocks_is_equal(one: Any, other: Any) -> None:
    assert prefix_hash({"engine_inputs": one}) == prefix_hash({"engine_inputs": other})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"prompt": "a"}, {"prompt": "b"}),
        ({"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [12]}),
        ({"messages": [{"role": "user", "content": "a"}]}, {"messages": [{"role": "user", "content": "b"}]}),
    ],
)
def test_what_begins_otherwise_differs(one: Any, other: Any) -> None:
    assert prefix_hash({"engine_inputs": one}) != prefix_hash({"engine_inputs": other})


@pytest.mark.parametrize("inputs", [None, {}, {"prompt": ""}, {"messages": []}, {"messages": [3]}, 7, {"prompt": b"x"}])
def test_without_a_prompt_requests_are_spread_by_their_ids(inputs: Any) -> None:
    hashes = {prefix_hash({"request_id": f"r{number}", "engine_inputs": inputs}) for number in range(50)}
    assert len(hashes) == 50


def test_hashes_are_the_same_in_every_process() -> None:
    assert prefix_hash(task("hello")) == 9652807877895417921


def test_a_replica_has_the_same_points_in_hubs_of_every_release() -> None:
    """Else hubs of two releases would send one conversation to two replicas."""
    points = list(_points(member(3)))
    assert (len(points), len(set(points))) == (48, 48)
    assert points[:2] == [227186995931782430, 17435189811146934715]
    assert points[-1] == 16131895334640302292


def test_of_those_that_left_none_is_picked_at_random_and_all_others_may_be() -> None:
    members = [member(number) for number in range(3)]
    index = index_of(*members)
    index.remove(members[0])
    assert {index._pick_random() for _ in range(50)} == set(members[1:])
    index.remove(members[2])
    assert index._pick_random() is members[1]
