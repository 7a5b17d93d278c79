"""Housekeeping: a pool that has nothing to do is never looked at, and one that has is looked at in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hub.config import PoolOptions
from hub.orchestrator.housekeeping import Housekeeping, TimersDue
from hub.pool.versions import make_pools
from omni_discovery.balancing.policies import RoundRobinBalancer
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from tests.support.hub_fakes import until


@dataclass
class Client:
    """A connection to a replica, and what was asked there."""

    info: ReplicaInfo
    wanted: list[int] = field(default_factory=list)
    is_broken: bool = False

    def want_credits(self, waiting: int, oldest_wait_s: float) -> None:
        if self.is_broken:
            raise RuntimeError("a third party's bug")
        self.wanted.append(waiting)


@dataclass
class Scene:
    """Two stages of one replica each, which gives credits; timers are run as the orchestrator does."""

    pools: Any = field(default_factory=lambda: make_pools([0, 1], RoundRobinBalancer, PoolOptions()))
    clients: dict[str, Client] = field(default_factory=dict)
    due: list[TimersDue] = field(default_factory=list)
    reviews: int = 0
    next_review_s: float | None = None

    def __post_init__(self) -> None:
        self.housekeeping = Housekeeping(self.pools, cast(Any, self), self._post)
        for pool in self.pools:
            addr = f"a{pool.stage_id}"
            info = ReplicaInfo(addr, "", pool.stage_id, ReplicaStatus.UP, 0, 0.0, 0.0, 0, capacity=4)
            self.clients[addr] = Client(info)
            pool.core.upsert(info, pool.now())
            pool.core.session_up(addr, pool.now(), uses_credits=True)

    def review_members(self) -> None:
        self.reviews += 1
        self.next_review_s = None

    def _post(self, due: TimersDue) -> None:
        self.due.append(due)
        self.housekeeping.run_timers(due)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    made = Scene()
    yield made
    made.housekeeping.close()


async def test_a_pool_without_work_sets_no_timer(scene: Scene) -> None:
    await asyncio.sleep(0.1)
    assert scene.due == []
    assert [client.wanted for client in scene.clients.values()] == [[], []]


async def test_credits_are_requested_once_for_all_picks_that_begin_to_wait_and_again_until_they_come(
    scene: Scene,
) -> None:
    """1. three picks of stage 0 wait: its replica is asked for three credits, 50 ms later again; stage 1 is left alone
    2. the credits come: the request is taken back, and nothing more is due
    """
    pool = scene.pools.of_stage(0)[0]
    picks = [asyncio.create_task(pool.pick(f"r{number}", {})) for number in range(3)]
    await asyncio.sleep(0.01)
    assert scene.clients["a0"].wanted == [3]
    await asyncio.sleep(0.07)
    assert scene.clients["a0"].wanted == [3, 3]
    pool.core.grant("a0", 3)
    await asyncio.gather(*picks)
    await asyncio.sleep(0.1)
    assert scene.clients["a0"].wanted == [3, 3, 0]
    assert scene.clients["a1"].wanted == []
    assert {due.pool for due in scene.due} == {pool}


async def test_a_client_that_raises_keeps_no_other_replica_from_being_asked(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """1. stage 0 has a client that raises, and one that does not; a pick waits in each of two stages
    2. all others are asked, and asked again; the client that raises is logged once, by its replica
    """
    scene.clients["a0"].is_broken = True
    first, second = scene.pools
    info = ReplicaInfo("b0", "", 0, ReplicaStatus.UP, 0, 0.0, 0.0, 1, capacity=4)
    scene.clients["b0"] = Client(info)
    first.core.upsert(info, first.now())
    first.core.session_up("b0", first.now(), uses_credits=True)
    picks = [asyncio.create_task(pool.pick("r", {})) for pool in (first, second)]
    await until(lambda: min(len(scene.clients[addr].wanted) for addr in ("b0", "a1")) >= 2, 30.0)
    assert [scene.clients[addr].wanted[:2] for addr in ("b0", "a1")] == [[1, 1], [1, 1]]
    assert [record.getMessage().partition(":")[0] for record in caplog.records if record.exc_info] == [
        "credits.bug replica=0/0 epoch=0"
    ]
    for pick in picks:
        pick.cancel()
    await asyncio.wait(picks)


async def test_a_replica_that_comes_while_picks_wait_is_asked_at_once(scene: Scene) -> None:
    pool = scene.pools.of_stage(0)[0]
    pool.core.session_down("a0", pool.now())
    pick = asyncio.create_task(pool.pick("r", {}))
    await asyncio.sleep(0.01)
    assert scene.clients["a0"].wanted == []
    pool.core.session_up("a0", pool.now(), uses_credits=True)
    await asyncio.sleep(0.01)
    assert scene.clients["a0"].wanted == [1]
    pool.core.grant("a0", 1)
    await pick


async def test_a_send_queue_that_was_full_is_tried_again_in_time(scene: Scene) -> None:
    pool = scene.pools.of_stage(0)[0]
    pool.core.grant("a0", 1)
    pool.core.send_queue_full("a0", pool.now())
    assert pool.core.try_pick("r", {}) is None
    await asyncio.sleep(0.08)
    assert [due.pool for due in scene.due] == [pool]
    assert pool.core.try_pick("r", {}) is not None


async def test_a_pool_that_is_made_later_is_watched_as_well() -> None:
    pools = make_pools([0], RoundRobinBalancer, PoolOptions())
    due: list[TimersDue] = []
    membership = SimpleNamespace(next_review_s=None, clients={})
    housekeeping = Housekeeping(pools, cast(Any, membership), due.append)
    pool = pools.get(0, "new")
    pool.core.upsert(ReplicaInfo("a", "", 0, ReplicaStatus.UP, 0, 0.0, 0.0, 0), pool.now())
    pool.core.send_queue_full("a", pool.now())
    await asyncio.sleep(0.08)
    assert [each.pool for each in due] == [pool]
    housekeeping.close()


async def test_the_membership_is_reviewed_when_it_says(scene: Scene) -> None:
    scene.next_review_s = time.monotonic() + 0.02
    scene.housekeeping.follow_membership()
    await asyncio.sleep(0.06)
    assert scene.due == [TimersDue(None)]
    assert scene.reviews == 1


async def test_a_closed_one_does_nothing_more(scene: Scene) -> None:
    pool = scene.pools.of_stage(0)[0]
    pool.core.send_queue_full("a0", pool.now())
    scene.housekeeping.close()
    scene.housekeeping.close()
    pick = asyncio.create_task(pool.pick("r", {}))
    await asyncio.sleep(0.08)
    assert (scene.due, scene.clients["a0"].wanted) == ([], [])
    pick.cancel()
