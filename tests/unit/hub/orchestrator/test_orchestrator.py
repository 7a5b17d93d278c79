"""A bug, in the hub or in a third party's part of it, costs one request, and no slot, no credit and no timer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hub.config import HubConfig, PoolOptions, QueueFullError
from hub.metrics import HubMetrics
from hub.orchestrator.active import AbortRequest, AddRequest, Ended
from hub.orchestrator.dispatcher import PickEnded
from hub.orchestrator.orchestrator import Orchestrator
from hub.orchestrator.rollout import Rollout
from hub.pool.stage_pool import StagePool
from hub.replicas.events import ClientEvent
from hub.replicas.stage_client import StageClient
from hub.request import events as ev
from hub.request.machine import RequestMachine
from hub.request.plan import RequestPlan
from omni_discovery.balancing.policies import RoundRobinBalancer
from omni_discovery.errors import RequestError
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from omni_discovery.view.table import Delta, View
from tests.support.hub_fakes import until

_PLAN = RequestPlan(stages=(0,), inputs={0: ()}, next_stages={0: ()}, finals={0: "text"})


def info(replica_id: int) -> ReplicaInfo:
    return ReplicaInfo(
        f"a{replica_id}", "", 0, ReplicaStatus.UP, 0, 0.0, 0.0, replica_id, epoch=replica_id + 1, capacity=4
    )


def view(revision: int, *replica_ids: int) -> View:
    return View({(0, each): info(each) for each in replica_ids}, revision=revision)


class Client:
    """A connection to a replica, as far as a view concerns it."""

    has_open_aborts = False

    def __init__(self, record: ReplicaInfo) -> None:
        self.info, self.addr = record, record.input_addr

    def want_credits(self, waiting: int, oldest_wait_s: float) -> None:
        pass

    def close(self) -> None:
        pass


class Scene:
    """An orchestrator of one stage; connecting to replica 9 raises."""

    def __init__(self) -> None:
        self.pool = StagePool(0, RoundRobinBalancer(), PoolOptions())
        self.hub = Orchestrator([self.pool], self._connect, HubConfig(registry_ttl_s=0.2), HubMetrics())
        self.task = asyncio.create_task(self.hub.run())

    def _connect(self, record: ReplicaInfo, _on_event: Callable[[ClientEvent], None]) -> StageClient:
        if record.replica_id == 9:
            raise RuntimeError("a third party's bug")
        return cast(StageClient, Client(record))

    def serve_replica(self, *, credit: int = 0) -> None:
        """A replica that lends credits, known to the pool alone."""
        self.pool.core.upsert(info(0), self.pool.now())
        self.pool.core.session_up("a0", self.pool.now(), uses_credits=True)
        self.pool.core.grant("a0", credit)

    async def add(self, request_id: str) -> None:
        request = AddRequest(request_id, request_id, {"prompt": "x"}, _PLAN, {}, 60.0, time.perf_counter())
        await self.hub.request_async_queue.put(request)
        await asyncio.sleep(0.01)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    made = Scene()
    yield made
    made.task.cancel()
    await asyncio.wait([made.task])


async def test_a_request_that_a_bug_ends_while_its_pick_waits_takes_no_slot_and_no_credit(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. the pick of r waits for a credit; r is aborted, and its machine raises: r ends
    2. the credit comes: it is there for the next request
    """
    scene.serve_replica()
    await scene.add("r")
    assert scene.pool.core.queue.waiters.count == 1

    def handle(*_args: Any) -> list[ev.Action]:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(RequestMachine, "handle", handle)
        await scene.hub.rpc_async_queue.put(AbortRequest("r"))
        await asyncio.sleep(0.01)
    request_id, last = scene.hub.output_async_queue.get_nowait()
    assert isinstance(last, Ended)
    assert (request_id, type(last.error)) == ("r", RequestError)
    assert scene.pool.core.queue.waiters.count == 0
    scene.pool.core.grant("a0", 1)
    await asyncio.sleep(0.01)
    assert (scene.pool.core.members.in_flight("a0"), scene.pool.core.members.credits("a0")) == ([], 1)


async def test_a_pick_that_ends_after_its_request_gives_its_slot_and_credit_back(scene: Scene) -> None:
    scene.serve_replica(credit=1)
    binding = scene.pool.core.try_pick("r", {})
    assert binding is not None
    dispatch = ev.Dispatch(0, 0, {}, {}, (), (), frozenset())
    scene.hub._post(PickEnded("r", dispatch, None, binding))
    await asyncio.sleep(0.01)
    assert (scene.pool.core.members.in_flight("a0"), scene.pool.core.members.credits("a0")) == ([], 1)


async def test_a_mass_loss_has_its_review_even_if_a_client_of_the_same_view_can_not_be_made(scene: Scene) -> None:
    """1. three replicas, with sessions; 2. all vanish in a view that has another, whose client raises: they are kept
    3. the time of the mass loss is over: only the last that answers stays
    """
    scene.hub.apply_view(view(1, 0, 1, 2), Delta())
    core = scene.pool.core
    await until(lambda: len(core.members.entries) == 3)
    for name in ("a0", "a1", "a2"):
        core.session_up(name, scene.pool.now())
    scene.hub.apply_view(view(2, 9), Delta())
    await until(lambda: core.members.held_count == 3)
    for name in ("a0", "a1"):
        core.session_down(name, scene.pool.now())
    await until(lambda: core.members.held_count == 1)


@pytest.mark.attack("E8")
async def test_of_views_that_come_at_once_one_is_gone_through(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. a hundred views in one turn of the loop; 2. a hundred while one is gone through: the last of each counts"""
    seen: list[int] = []

    def apply_view(_rollout: Rollout, view: View, _delta: Delta) -> None:
        seen.append(view.revision)
        if view.revision == 100:
            for revision in range(101, 201):
                scene.hub.apply_view(View(revision=revision), Delta())

    monkeypatch.setattr(Rollout, "apply_view", apply_view)
    for revision in range(1, 101):
        scene.hub.apply_view(View(revision=revision), Delta())
    await until(lambda: seen[-1:] == [200])
    assert seen == [100, 200]


async def test_an_index_that_raises_when_a_bug_has_ended_a_request_does_not_end_the_hub(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. r has a binding; its machine and the pool's index raise: r ends; 2. the next request is handled"""
    scene.serve_replica()
    await scene.add("r")
    scene.pool.core.bind("r", "a0")

    def broken(*_args: Any) -> Any:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(RequestMachine, "handle", broken)
        patch.setattr(scene.pool.core, "_reindex", broken)
        await scene.hub.rpc_async_queue.put(AbortRequest("r"))
        await asyncio.sleep(0.01)
    assert not scene.task.done()
    assert (scene.hub.request_states, scene.pool.core.bound("r")) == ({}, None)
    await scene.add("s")
    assert list(scene.hub.request_states) == ["s"]


async def test_a_replica_that_takes_no_message_is_not_picked_at_once(scene: Scene) -> None:
    """Its process has just died, say, and its session still stands: attempts must not go there one after the other."""

    class Full(Client):
        def send_message(self, message: Any) -> None:
            raise QueueFullError("nobody is connected")

        submit = send_message

    scene.serve_replica(credit=4)
    replica = ev.ReplicaRef(0, 0, 1, "a0")
    scene.hub._membership.clients["a0"] = cast(StageClient, Full(info(0)))
    active: Any = SimpleNamespace(pools={0: scene.pool}, request=SimpleNamespace(request_id="r"))
    for action in (ev.FeedInput(0, 0, replica, 0, 0, None), ev.Update(0, 0, replica, 1, {}, (), is_last=True)):
        assert scene.pool.core.has_free(set())
        assert isinstance(scene.hub._dispatcher.pass_on(active, action), ev.ReplicaLost)
        assert not scene.pool.core.has_free(set())
        await until(lambda: scene.pool.core.has_free(set()))
