"""Pools: one pool for each stage and version, found by a record's fingerprint."""

from __future__ import annotations

import pytest

from hub.config import PoolOptions
from hub.pool.stage_pool import StagePool
from hub.pool.versions import MOST_POOLS, Pools, make_pools
from omni_discovery.balancing.policies import LeastLoadBalancer
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus


def pools_of(*stage_ids: int) -> Pools:
    return make_pools(stage_ids, LeastLoadBalancer, PoolOptions())


def info(stage_id: int = 0, fingerprint: str = "", addr: str = "tcp://h:1") -> ReplicaInfo:
    return ReplicaInfo(addr, "tcp://h:2", stage_id, ReplicaStatus.UP, 0, 0.0, 0.0, fingerprint=fingerprint)


def test_each_fingerprint_has_a_pool_of_its_own_and_none_has_the_first() -> None:
    pools = pools_of(0, 1)
    first = pools.of(info())
    new = pools.of(info(fingerprint="f"))
    assert new is not first
    assert pools.of(info(fingerprint="f")) is new
    assert pools.of_stage(0) == (first, new)
    assert len(pools.of_stage(1)) == 1
    assert set(pools) == {first, new, *pools.of_stage(1)}


def test_the_first_pool_can_be_that_of_a_fingerprint_too() -> None:
    pools = pools_of(0)
    assert pools.begin_with(0, "f") is pools.of(info()) is pools.of(info(fingerprint="f"))
    assert len(pools.of_stage(0)) == 1


def test_without_a_maker_all_versions_share_the_first_pool() -> None:
    pool = StagePool(0, LeastLoadBalancer())
    pools = Pools([pool])
    assert pools.of(info(fingerprint="f")) is pools.get(0, "g") is pool
    assert pools.of_stage(0) == (pool,)


def test_a_stage_that_the_pipeline_has_not_is_an_error() -> None:
    pools = pools_of(0)
    assert 1 not in pools
    with pytest.raises(KeyError):
        pools.of(info(stage_id=1))


def test_every_pool_is_watched_also_one_that_is_made_later() -> None:
    pools = pools_of(0, 1)
    watched: list[StagePool] = []
    pools.watch_pools(watched.append)
    assert watched == list(pools)
    new = pools.get(0, "f")
    assert pools.get(0, "f") is new
    assert watched[-1] is new
    assert len(watched) == 3


def test_a_record_is_found_in_whatever_version_it_is() -> None:
    pools = pools_of(0)
    mine = info(fingerprint="f")
    assert pools.record(0, mine.input_addr) is None
    pools.of(mine).core.upsert(mine, 0.0)
    assert pools.record(0, mine.input_addr) == mine
    assert not pools.answers(0, mine.input_addr)
    pools.of(mine).core.session_up(mine.input_addr, 0.0)
    assert pools.answers(0, mine.input_addr)


def test_pools_without_replicas_are_forgotten_but_for_the_first_and_those_that_are_kept() -> None:
    pools = pools_of(0)
    used, kept, unused = (pools.get(0, name) for name in ("used", "kept", "unused"))
    used.core.upsert(info(fingerprint="used"), 0.0)
    pools.forget_unused([kept])
    assert pools.of_stage(0) == (pools.of(info()), used, kept)
    assert pools.get(0, "used") is used
    assert pools.get(0, "unused") is not unused


@pytest.mark.attack("P1")
def test_versions_that_come_when_there_are_many_share_a_pool_until_they_are_served() -> None:
    """1. hundreds of versions: few pools; 2. one of them is served: its replicas are in the wrong pool
    3. while any is in the shared pool, all that come go there; 4. then pools are made again
    """
    pools = pools_of(0, 1)
    infos = [info(fingerprint=f"f{each}", addr=f"tcp://h:{each}") for each in range(500)]
    for each in infos:
        pools.of(each).core.upsert(each, 0.0)
    assert len(pools.of_stage(0)) == len(set(pools)) - 1 == MOST_POOLS + 1
    rest = pools.of(infos[-1])
    assert pools.misplaced() == []
    served = pools.serve(0, "f400")
    assert pools.of(infos[400]) is pools.get(0, "f400") is served is not rest
    assert pools.misplaced() == [(rest, infos[400])]
    for each in infos[:-1]:
        for pool in pools.of_stage(0):
            pool.core.remove(each.input_addr, 0.0)
    pools.forget_unused([])
    assert len(pools.of_stage(0)) == 2
    assert pools.get(0, "another") is pools.of(infos[-1]) is rest
    rest.core.remove(infos[-1].input_addr, 0.0)
    pools.forget_unused([])
    assert pools.get(0, "another") not in (rest, pools.of(info()), pools.get(0, "third"))


def test_a_pool_that_is_made_later_knows_how_many_hubs_there_are() -> None:
    pools = pools_of(0)
    pools.set_live_hubs(3)
    assert [pool.core.members.hubs for pool in (pools.of(info()), pools.get(0, "later"))] == [3, 3]


def test_without_a_maker_a_version_that_is_served_is_in_the_first_pool_too() -> None:
    pool = StagePool(0, LeastLoadBalancer())
    assert Pools([pool]).serve(0, "f") is pool
