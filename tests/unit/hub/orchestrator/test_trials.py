"""Trials: suspects' dispatches, held and let go."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

from hub.orchestrator.trials import TrialDue, Trials, tried
from hub.pool.probation import GiveUp, Together, Try
from hub.pool.stage_pool import PoolOptions, StagePool
from hub.request import events as ev
from omni_discovery.balancing.policies import RoundRobinBalancer
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus


class Scene:
    """Trials of one stage, and what they let go."""

    def __init__(self, pick_timeout_s: float = 120.0) -> None:
        self.pool = StagePool(0, RoundRobinBalancer(), PoolOptions(pick_timeout_s))
        self.due: list[TrialDue] = []
        self.trials = Trials(self.due.append)

    def serve_replicas(self, *replica_ids: int) -> None:
        for number in replica_ids:
            info = ReplicaInfo(f"a{number}", "", 0, ReplicaStatus.UP, 0, 0.0, 0.0, number, epoch=number, capacity=4)
            self.pool.core.upsert(info, self.pool.now())
            self.pool.core.session_up(info.input_addr, self.pool.now())

    def hold(self, request_id: str, *died: int, lost_after_s: float = 0.0) -> None:
        deaths = tuple(ev.ReplicaRef(0, number, number, f"a{number}") for number in died or (9,))
        dispatch = ev.Dispatch(0, 1, {}, {}, (), (), frozenset({"slow"}), blamed_for=deaths)
        run = SimpleNamespace(sent_at_s=7.0, dispatched_at_s=7.0 + lost_after_s, deaths=len(deaths))
        active: Any = SimpleNamespace(
            request=SimpleNamespace(request_id=request_id),
            machine=SimpleNamespace(runs={0: run}),
            pools={0: self.pool},
            deadline_s=time.perf_counter() + 600.0,
        )
        self.trials.hold(active, dispatch)

    async def wait(self, count: int) -> list[str]:
        """The requests that were let go, once there are so many."""
        for _ in range(3000):
            if len(self.due) >= count:
                break
            await asyncio.sleep(0.01)
        assert len(self.due) == count
        return [each.request_id for each in self.due]


async def test_the_next_suspect_is_let_go_when_the_trial_before_is_over() -> None:
    scene = Scene()
    scene.serve_replicas(1, 2)
    scene.hold("a")
    scene.hold("b")
    assert await scene.wait(1) == ["b"]
    scene.trials.placed("b", 0, "a1")
    await asyncio.sleep(0.2)
    assert len(scene.due) == 1
    assert scene.trials.forget("b", 0) is not None
    assert await scene.wait(2) == ["b", "a"]
    scene.trials.close()


async def test_suspects_that_wait_too_long_are_tried_together_and_all_of_them_are_told() -> None:
    """1. a and b were at one death; one is tried, and puts out nothing
    2. after a second the other comes to the same replica: its end would prove nothing about either
    """
    scene = Scene()
    scene.serve_replicas(1, 2)
    scene.hold("a")
    scene.hold("b")
    await scene.wait(1)
    scene.trials.placed("b", 0, "a1")
    assert await scene.wait(2) == ["b", "a"]
    assert scene.due[1].step == Try("a", frozenset({"a2"}))
    scene.trials.placed("a", 0, "a1")
    assert [each.step for each in scene.due[2:]] == [Together("b"), Together("a")]
    scene.trials.close()


async def test_suspects_wait_for_each_other_longer_where_their_replica_took_long_to_end() -> None:
    """One that hangs is found out before any other is tried beside it."""
    scene = Scene()
    scene.serve_replicas(1, 2)
    scene.hold("a", lost_after_s=60.0)
    scene.hold("b", lost_after_s=0.1)
    await scene.wait(1)
    scene.trials.placed("b", 0, "a1")
    await asyncio.sleep(1.5)
    assert len(scene.due) == 1
    scene.trials.close()


async def test_a_replica_that_comes_lets_a_suspect_go_without_being_told() -> None:
    scene = Scene()
    scene.serve_replicas(1)
    scene.hold("a")
    await asyncio.sleep(0.2)
    assert scene.due == []
    scene.serve_replicas(2)
    assert await scene.wait(1) == ["a"]
    scene.trials.close()


async def test_without_any_replica_a_suspect_is_given_up_after_the_pick_timeout() -> None:
    scene = Scene(pick_timeout_s=0.1)
    scene.hold("a")
    await scene.wait(1)
    assert scene.due[0].step == GiveUp("a")
    assert len(scene.trials) == 0


async def test_with_the_cause_found_all_that_it_explains_go_at_once() -> None:
    scene = Scene()
    scene.serve_replicas(1)
    scene.hold("a", 7)
    scene.hold("b", 8)
    scene.trials.explain(scene.pool, [ev.ReplicaRef(0, 7, 7, "a7")])
    await scene.wait(1)
    assert scene.due[0].step == Try("a", is_trial=False)
    assert len(scene.trials) == 1
    scene.trials.close()


async def test_a_suspect_that_was_sent_stays_on_trial_where_others_are_taken_back() -> None:
    """Its request moves to another deploy document."""
    scene = Scene()
    scene.serve_replicas(1, 2)
    scene.hold("a")
    scene.hold("b")
    await scene.wait(1)
    assert scene.trials.hold_again("b", 0)
    assert not scene.trials.hold_again("x", 0)
    await scene.wait(2)
    scene.trials.placed("b", 0, "a1")
    assert scene.trials.take_back("b", 0) is None
    assert scene.trials.take_back("a", 0) == scene.due[0].dispatch
    assert len(scene.trials) == 1
    scene.trials.close()


def test_a_dispatch_that_is_tried_avoids_the_replicas_of_other_suspects() -> None:
    dispatch = ev.Dispatch(0, 1, {}, {}, (), (), frozenset({"a"}), blamed_for=(ev.ReplicaRef(0, 1, 1, "x"),))
    sent = tried(dispatch, Try("r", frozenset({"b"})))
    assert (sent.avoid, sent.blamed_for) == ({"a", "b"}, ())
