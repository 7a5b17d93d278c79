"""What a pool looked like when it picked: enough for the shipped policy to pick the same again."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hub.config import PoolOptions
from hub.pool.core import Pool
from hub.pool.entry import Binding
from hub.pool.snapshots import MOST_ROWS, picking_of
from omni_discovery.balancing.policies import LoadBalancingPolicy, RandomBalancer, build_load_balancer_factory
from omni_discovery.receipts.receipt import BY_BINDING, BY_POLICY, LAST_RESORT, Picking
from omni_discovery.receipts.replay import replay
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus

KEPT = PoolOptions(slow_start_s=0.0, keeps_snapshots=True)


def info(replica_id: int, **fields: Any) -> ReplicaInfo:
    address = f"tcp://{replica_id}:1"
    info = ReplicaInfo(address, address, 0, ReplicaStatus.UP, 0, 0.0, 0.0, replica_id=replica_id, epoch=replica_id + 7)
    return replace(info, **fields)


def pool_of(count: int, policy: str = "random", options: PoolOptions = KEPT) -> Pool:
    pool = Pool(0, build_load_balancer_factory(policy)(), options)
    for replica_id in range(count):
        pool.upsert(info(replica_id), 0.0)
        pool.session_up(f"tcp://{replica_id}:1", 0.0)
    return pool


def picking(binding: Binding | None, policy: str = "random") -> Picking:
    assert binding is not None
    assert binding.snapshot is not None
    return picking_of(binding.snapshot, 0, policy)


class Life:
    """A pool under random events; every pick of it is made again from its snapshot."""

    def __init__(self, policy: str, options: PoolOptions) -> None:
        self.policy = policy
        self.pool = pool_of(0, policy, options)
        self.running: list[str] = []
        self.now_s = 0.0
        self.picks = 0

    def play(self, chance: random.Random, steps: int) -> None:
        for number in range(steps):
            self.now_s += chance.random()
            self._step(chance, f"r{number}", f"tcp://{chance.randrange(9)}:1")

    def _step(self, chance: random.Random, request_id: str, addr: str) -> None:
        pool, now_s = self.pool, self.now_s
        match chance.choice(["up", "up", "down", "report", "grant", "recall", "end", "fail", "time", *["pick"] * 8]):
            case "up":
                replica_id = int(addr.split("/")[2].split(":")[0])
                weight = chance.choice([1.0, 1.0, 1.0, 0.3, 2.5, 16.0])
                labels = chance.choice([{}, {"rack": "a"}])
                pool.upsert(info(replica_id, weight=weight, capacity=chance.randrange(1, 5), labels=labels), now_s)
                pool.session_up(addr, now_s, uses_credits=chance.random() < 0.4)
            case "down":
                pool.session_down(addr, now_s)
            case "report":
                pool.report(addr, chance.randrange(6), now_s)
            case "grant":
                pool.grant(addr, chance.randrange(4))
            case "recall":
                pool.recall(addr, chance.randrange(2))
            case "fail":
                pool.failed(addr, now_s, "it broke", request_id)
            case "time":
                pool.run_timers(now_s)
            case "end" if self.running:
                pool.release(self.running.pop(chance.randrange(len(self.running))))
            case "pick":
                self._pick(request_id, chance)

    def _pick(self, request_id: str, chance: random.Random) -> None:
        words = chance.choice(["one", "two", "three", "four"]) * 40
        avoid = [f"tcp://{chance.randrange(9)}:1"] if chance.random() < 0.3 else []
        binding = self.pool.pick(
            request_id, {"request_id": request_id, "engine_inputs": {"prompt": words}}, None, avoid
        )
        if binding is None:
            return
        self.running.append(request_id)
        self.picks += 1
        replayed = replay(picking(binding, self.policy))
        assert (replayed.choice, replayed.lacks) == (binding.info.name, "")


@pytest.mark.parametrize("policy", [each.value for each in LoadBalancingPolicy])
@pytest.mark.parametrize("options", [KEPT, PoolOptions(keeps_snapshots=True, labels={"rack": "a"})])
def test_the_policy_picks_the_same_again_from_a_snapshot_of_any_pool(policy: str, options: PoolOptions) -> None:
    """Whatever happened to the pool before: replicas that came and went, weights, credits, ejections, avoided ones."""
    chance, picks = random.Random(policy), 0
    for _ in range(25):
        life = Life(policy, options)
        life.play(chance, 120)
        picks += life.picks
    assert picks > 200


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 1 << 30), policy=st.sampled_from([each.value for each in LoadBalancingPolicy]))
def test_no_pool_is_found_whose_pick_comes_out_otherwise(seed: int, policy: str) -> None:
    Life(policy, KEPT).play(random.Random(seed), 60)


def test_nothing_is_kept_where_nobody_wants_it() -> None:
    binding = pool_of(2, options=PoolOptions()).pick("r", {})
    assert binding is not None
    assert binding.snapshot is None


def test_a_snapshot_tells_who_was_left_out_and_why() -> None:
    """0 is cordoned, 1 has no session, 2 has failed the request, 3 is full, 4 ejected, 5 has no credit, 6 is free.
    The send queue to 7 is full, 8 is gone and has work in flight.
    """
    pool = pool_of(9)
    pool.bind("old", "tcp://8:1")
    pool.remove("tcp://8:1", 1.0)
    pool.send_queue_full("tcp://7:1", 1.0)
    pool.upsert(info(0, cordoned=True), 1.0)
    pool.session_down("tcp://1:1", 1.0)
    for replica_id in (3, 5):
        pool.session_up(f"tcp://{replica_id}:1", 1.0, uses_credits=True)
    pool.report("tcp://3:1", info(3).capacity, 1.0)
    for number in range(5):
        pool.failed("tcp://4:1", 1.0, "it broke", f"x{number}")
    told = picking(pool.pick("r", {}, None, ["tcp://2:1"]))
    out = {each.replica: each.out for each in told.candidates}
    ejected = out.pop("0/4")
    assert out == {
        "0/0": "cordoned",
        "0/1": "without a session",
        "0/2": "it has failed this request, or was late with it",
        "0/3": "full: all its slots are taken",
        "0/5": "without a credit of this hub, though it reports free slots",
        "0/6": "",
        "0/7": "its send queue is full",
        "0/8": "it is not registered any more",
    }
    assert ejected.startswith("ejected: ")
    assert "it broke" in ejected
    assert (told.chosen, told.chosen_epoch, told.known, told.cut) == ("0/6", 13, 9, 0)


def test_a_snapshot_shows_credits_where_they_are_used() -> None:
    pool = pool_of(2)
    pool.session_up("tcp://1:1", 1.0, uses_credits=True)
    assert [each.credits for each in picking(pool.pick("r", {})).candidates] == [None, 0]
    pool.grant("tcp://1:1", 3)
    assert [each.credits for each in picking(pool.pick("s", {})).candidates] in ([None, 3], [None, 2])


def test_a_request_that_follows_its_parent_is_told_so() -> None:
    pool = pool_of(3)
    parent = pool.pick("parent", {})
    told = picking(pool.pick("child", {}, "parent"))
    assert (told.how, told.chosen) == (BY_BINDING, picking(parent).chosen)
    assert replay(told).note.startswith("the request, or the one that it belongs to, was there already")


def test_an_ejected_replica_that_is_taken_for_want_of_others_is_told_so() -> None:
    """With five replicas one failing one is ejected; a request that avoids the other four gets it all the same."""
    pool = pool_of(5)
    for number in range(5):
        pool.failed("tcp://4:1", 1.0, "it broke", f"x{number}")
    told = picking(pool.pick("r", {}, None, [f"tcp://{each}:1" for each in range(4)]))
    assert (told.how, told.chosen, replay(told).choice) == (LAST_RESORT, "0/4", "0/4")


@pytest.mark.parametrize("policy", ["random", "round-robin"])
def test_of_thousands_of_replicas_a_snapshot_holds_some_and_the_one_that_was_chosen(policy: str) -> None:
    pool = pool_of(2000, policy)
    for number in range(40):
        told = picking(pool.pick(f"r{number}", {}), policy)
        assert len(told.candidates) <= MOST_ROWS + 1
        assert told.chosen in [each.replica for each in told.candidates]
        assert (told.known, told.free) == (2000, 2000)
        assert told.cut == 2000 - len(told.candidates)
        assert replay(told).lacks.startswith(f"{told.cut} of 2000 replicas")


def test_a_pick_that_found_nobody_leaves_a_snapshot_too() -> None:
    pool = Pool(0, RandomBalancer(), KEPT)
    pool.upsert(info(0), 0.0)
    assert pool.pick("r", {}) is None
    snapshot = pool.snapshot_of_wait()
    assert snapshot is not None
    told = picking_of(snapshot, 0, "random")
    assert (told.chosen, [each.out for each in told.candidates]) == ("", ["without a session"])


def test_a_replica_without_a_credit_whose_slots_other_hubs_may_have_taken_is_not_said_to_be_free() -> None:
    pool = pool_of(2)
    pool.set_live_hubs(3)
    pool.session_up("tcp://1:1", 1.0, uses_credits=True)
    pool.upsert(info(1, capacity=3), 1.0)
    pool.bind("mine", "tcp://1:1")
    told = picking(pool.pick("r", {}))
    assert (told.candidates[1].load, told.candidates[1].out) == (3, "full: all its slots are taken")
    pool.upsert(info(1, capacity=4), 1.0)
    assert picking(pool.pick("s", {})).candidates[1].out == (
        "without a credit of this hub, though it reports free slots"
    )


def test_a_snapshot_shows_what_the_policy_went_by() -> None:
    """1. a and b as they are; 2. of 33 replicas 32 are shown, and the chosen one where it is another"""
    pool = pool_of(2, "least-load", PoolOptions(slow_start_s=0.0, keeps_snapshots=True, labels={"rack": "1"}))
    pool.upsert(info(1, weight=2.0, capacity=4, labels={"rack": "1"}), 0.0)
    pool.report("tcp://1:1", 2, 0.0)
    told = picking(pool.pick("r", {}), "least-load")
    assert (told.how, told.policy, told.chosen, told.known, told.free) == (BY_POLICY, "least-load", "0/1", 2, 2)
    far, near = told.candidates
    assert (far.load, far.reported, far.capacity, far.weight, far.tier, far.is_local) == (0, 0, 1, 1.0, 1, False)
    assert (near.load, near.reported, near.capacity, near.weight, near.tier, near.is_local) == (2, 2, 4, 2.0, 0, True)
    assert (near.is_probed, near.out) == (False, "")
    many = pool_of(MOST_ROWS + 1, "round-robin")
    for number in range(MOST_ROWS + 1):
        told = picking(many.pick(f"r{number}", {}), "round-robin")
        is_beyond = told.chosen == f"0/{MOST_ROWS}"
        assert (len(told.candidates), told.cut) == (MOST_ROWS + is_beyond, 1 - is_beyond)
    exact = picking(pool_of(MOST_ROWS).pick("r", {}))
    assert (len(exact.candidates), exact.cut) == (MOST_ROWS, 0)


def test_a_request_that_is_bound_shows_that_replica_alone() -> None:
    pool = pool_of(3)
    pool.bind("parent", "tcp://1:1")
    told = picking(pool.pick("child", {}, "parent"))
    assert ([each.replica for each in told.candidates], told.known, told.free, told.cut) == (["0/1"], 3, 3, 0)
    assert told.chosen_epoch == info(1).epoch
