"""The seeds' balancers, statement by statement."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from omni_discovery.balancing.base import Member
from omni_discovery.balancing.policies import (
    LeastQueueLengthBalancer,
    LoadBalancer,
    LoadBalancingPolicy,
    RandomBalancer,
    RoundRobinBalancer,
    Task,
    build_load_balancer_factory,
)
from omni_discovery.errors import ConfigError
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus

TASK: Task = {"request_id": "r"}


def replicas(*queue_lengths: int) -> list[ReplicaInfo]:
    return [
        ReplicaInfo(f"in{number}", f"out{number}", 0, ReplicaStatus.UP, length, 0.0, 0.0)
        for number, length in enumerate(queue_lengths)
    ]


@pytest.mark.parametrize("policy", list(LoadBalancingPolicy))
def test_statement_7_no_policy_chooses_from_nothing(policy: str) -> None:
    with pytest.raises(ValueError, match="replicas must not be empty"):
        build_load_balancer_factory(policy)().select(TASK, [])


@pytest.mark.parametrize("policy", list(LoadBalancingPolicy))
def test_statement_16_choosing_leaves_the_list_as_it_is_and_takes_an_empty_task(policy: str) -> None:
    listed = replicas(3, 1, 2)
    before = copy.deepcopy(listed)
    assert build_load_balancer_factory(policy)().select({}, listed) in range(3)
    assert listed == before


def test_statement_8_random_reaches_every_replica() -> None:
    chosen = {RandomBalancer().select(TASK, replicas(0, 0, 0)) for _ in range(300)}
    assert chosen == {0, 1, 2}


def test_statement_9_round_robin_goes_around() -> None:
    balancer, listed = RoundRobinBalancer(), replicas(0, 0, 0)
    assert [balancer.select(TASK, listed) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_statement_10_round_robin_starts_where_told_modulo_the_length() -> None:
    assert RoundRobinBalancer(start_index=5).select(TASK, replicas(0, 0, 0)) == 2


def test_statement_11_round_robin_stays_in_range_when_the_list_shrinks() -> None:
    """After index 3 of five the next is 4 of five; of two replicas that is the first."""
    balancer = RoundRobinBalancer(start_index=3)
    assert balancer.select(TASK, replicas(0, 0, 0, 0, 0)) == 3
    assert balancer.select(TASK, replicas(0, 0)) == 0
    assert balancer.select(TASK, replicas(0)) == 0


def test_round_robin_by_weight_owes_a_newcomer_no_turns_of_before_it_came() -> None:
    balancer = RoundRobinBalancer()
    weights = {"a": 1.0, "b": 2.0, "c": 1.0}
    listed = [replace(replicas(0)[0], input_addr=name, weight=weight) for name, weight in weights.items()]
    for _ in range(30):
        balancer.select(TASK, listed[:2])
    chosen = Counter(balancer.select(TASK, listed) for _ in range(8))
    assert chosen == {0: 2, 1: 4, 2: 2}


def test_statement_12_round_robin_is_fair_to_many_threads() -> None:
    balancer, listed = RoundRobinBalancer(), replicas(0, 0, 0, 0)
    with ThreadPoolExecutor(8) as pool:
        chosen = Counter(pool.map(lambda _: balancer.select(TASK, listed), range(4000)))
    assert chosen == {0: 1000, 1: 1000, 2: 1000, 3: 1000}


def test_statement_13_least_queue_length_takes_the_shortest() -> None:
    assert LeastQueueLengthBalancer().select(TASK, replicas(4, 2, 9)) == 1


def test_statement_14_least_queue_length_breaks_ties_by_chance() -> None:
    chosen = Counter(LeastQueueLengthBalancer().select(TASK, replicas(1, 5, 1)) for _ in range(600))
    assert set(chosen) == {0, 2}
    assert min(chosen.values()) > 200


def weighing(weight: float, queue_length: int = 0) -> ReplicaInfo:
    return replace(replicas(queue_length)[0], weight=weight)


def test_least_queue_length_takes_the_shortest_queue_for_its_weight() -> None:
    """Six waiting for a replica of weight 3 are fewer, each for each, than three for one of weight 1."""
    assert LeastQueueLengthBalancer().select(TASK, [weighing(1.0, 3), weighing(3.0, 6)]) == 1
    assert LeastQueueLengthBalancer().select(TASK, [weighing(1.0, 3), weighing(0.5, 2)]) == 0


def test_idle_replicas_are_taken_as_often_as_they_weigh() -> None:
    listed = [weighing(1.0), weighing(0.5), weighing(0.0)]
    chosen = Counter(LeastQueueLengthBalancer().select(TASK, listed) for _ in range(900))
    assert set(chosen) == {0, 1}
    assert 1.4 < chosen[0] / chosen[1] < 2.9


def test_weights_of_nothing_still_give_an_answer() -> None:
    assert LeastQueueLengthBalancer().select(TASK, [weighing(0.0, 2), weighing(0.0, 1)]) == 1
    assert LeastQueueLengthBalancer().select(TASK, [weighing(5e-324, 7), weighing(1.0, 9)]) == 1


def test_statement_15_least_queue_length_refuses_a_negative_length() -> None:
    with pytest.raises(ValueError, match=r"^queue_length must be non-negative: replica \S+ says -1$"):
        LeastQueueLengthBalancer().select(TASK, replicas(0, -1))


def test_statement_17_a_balancer_that_can_not_choose_can_not_be_made() -> None:
    with pytest.raises(TypeError):
        LoadBalancer()  # type: ignore[abstract]


def test_statement_18_policies_go_by_their_names() -> None:
    made = {policy: type(build_load_balancer_factory(policy)()) for policy in ("random", "round-robin")}
    assert made == {"random": RandomBalancer, "round-robin": RoundRobinBalancer}
    assert isinstance(build_load_balancer_factory("least-queue-length")(), LeastQueueLengthBalancer)
    assert LoadBalancingPolicy("least-queue-length") == "least-queue-length"


def test_statement_18_an_unknown_policy_is_told_what_the_valid_ones_are() -> None:
    with pytest.raises(ValueError, match="random, round-robin, least-queue-length"):
        build_load_balancer_factory("fastest")


@pytest.mark.parametrize("policy", ["random", "round-robin"])
def test_every_policy_of_a_list_heeds_weights(policy: str) -> None:
    balancer, listed = build_load_balancer_factory(policy)(), [weighing(1.0), weighing(0.5), weighing(0.0)]
    listed = [replace(each, input_addr=f"in{number}") for number, each in enumerate(listed)]
    chosen = Counter(balancer.select(TASK, listed) for _ in range(1200))
    assert set(chosen) == {0, 1}
    assert 1.5 < chosen[0] / chosen[1] < 2.7


@pytest.mark.parametrize("policy", ["least-load", "power-of-two"])
def test_of_two_the_one_with_less_load_for_its_capacity_is_chosen(policy: str) -> None:
    listed = [replace(replicas(3)[0], capacity=1), replace(replicas(4)[0], input_addr="b", capacity=8)]
    assert {build_load_balancer_factory(policy)().select(TASK, listed) for _ in range(20)} == {1}


@pytest.mark.parametrize("policy", list(LoadBalancingPolicy))
def test_weights_of_nothing_give_an_answer_in_every_policy(policy: str) -> None:
    assert build_load_balancer_factory(policy)().select(TASK, [weighing(0.0), weighing(0.0)]) in (0, 1)


def test_prefix_hash_of_a_list_is_the_same_each_time() -> None:
    balancer, listed = build_load_balancer_factory("prefix-hash")(), replicas(0, 0, 0, 0)
    listed = [replace(each, replica_id=number) for number, each in enumerate(listed)]
    tasks: list[Task] = [{"engine_inputs": {"prompt": f"{number} " * 40}} for number in range(50)]
    first = [balancer.select(task, listed) for task in tasks]
    assert [balancer.select(task, listed) for task in tasks] == first
    assert len(set(first)) > 1


# ---- third parties


class Last(LoadBalancer):
    def select(self, task: Task, replicas: list[ReplicaInfo]) -> int:
        return len(replicas) - 1


def no_balancer() -> str:
    return "least-load"


def broken() -> LoadBalancer:
    raise ZeroDivisionError


def with_plugins(monkeypatch: pytest.MonkeyPatch, **plugins: str) -> None:
    points = [EntryPoint(name, f"{__name__}:{what}", "omni_discovery.policies") for name, what in plugins.items()]
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Last.__module__])
    monkeypatch.setattr("omni_discovery.plugins.entry_points", lambda group: EntryPoints(points).select(group=group))


def test_a_policy_of_a_third_party_goes_by_the_name_of_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    with_plugins(monkeypatch, last="Last")
    factory = build_load_balancer_factory("last")
    assert factory().select(TASK, replicas(0, 0, 0)) == 2
    assert factory() is not factory()


def test_statement_18_valid_names_are_those_of_third_parties_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with_plugins(monkeypatch, zoned="Last", mine="Last")
    with pytest.raises(ValueError, match=r"least-load, power-of-two, prefix-hash, mine, zoned$"):
        build_load_balancer_factory("fastest")


def test_a_third_party_can_not_take_a_name_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    with_plugins(monkeypatch, random="Last")
    assert build_load_balancer_factory("random") is RandomBalancer


@pytest.mark.parametrize(
    ("what", "says"), [("broken", "ZeroDivisionError"), ("nothing_there", "AttributeError"), ("no_balancer", "a str")]
)
def test_a_broken_policy_is_named_at_the_start(monkeypatch: pytest.MonkeyPatch, what: str, says: str) -> None:
    with_plugins(monkeypatch, theirs=what)
    with pytest.raises(ConfigError, match=f"'theirs'.*is broken.*{says}"):
        build_load_balancer_factory("theirs")


def test_each_stage_gets_a_balancer_of_its_own() -> None:
    factory = build_load_balancer_factory("round-robin")
    assert factory() is not factory()


def test_a_load_that_is_given_counts_and_not_the_report() -> None:
    info = ReplicaInfo("a", "", 0, ReplicaStatus.UP, 3, 0.0, 0.0)
    assert [Member(info, load).load for load in (None, 0, 5)] == [3, 0, 5]
