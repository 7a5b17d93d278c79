"""The life of a replica, decided without a replica."""

from __future__ import annotations

import pytest

from omni_discovery.records.schema import ReplicaStatus
from omni_discovery.wire import FailureKind
from stage_runtime.lifecycle import (
    DrainAsked,
    EngineDied,
    EngineLoaded,
    Lifecycle,
    LifecycleEvent,
    LifeState,
    WorkFinished,
    admit,
    published_status,
    stalled,
)


def after(*events: LifecycleEvent) -> Lifecycle:
    life = Lifecycle()
    for event in events:
        life.handle(event)
    return life


def test_a_replica_loads_serves_drains_and_stops() -> None:
    life = Lifecycle()
    seen = [life.state]
    for event in (EngineLoaded(), DrainAsked(), WorkFinished()):
        assert life.handle(event)
        seen.append(life.state)
    assert seen == [LifeState.STARTING, LifeState.READY, LifeState.DRAINING, LifeState.STOPPED]


@pytest.mark.parametrize("events", [(), (EngineLoaded(),), (EngineLoaded(), DrainAsked())])
def test_an_engine_may_die_at_any_time_and_the_reason_is_kept(events: tuple[LifecycleEvent, ...]) -> None:
    life = after(*events)
    assert life.handle(EngineDied("out of memory"))
    assert (life.state, life.reason) == (LifeState.FAILED, "out of memory")


def test_what_does_not_fit_changes_nothing() -> None:
    """1. work that finishes while the replica serves is no reason to stop
    2. an engine that finishes loading after the drain began does not undo the drain
    3. a second drain is no change
    """
    assert not after(EngineLoaded()).handle(WorkFinished())
    draining = after(DrainAsked())
    assert not draining.handle(EngineLoaded())
    assert not draining.handle(DrainAsked())
    assert draining.state is LifeState.DRAINING


@pytest.mark.parametrize("end", [WorkFinished(), EngineDied("x")])
def test_the_end_is_final(end: LifecycleEvent) -> None:
    life = after(EngineLoaded(), DrainAsked(), end)
    stage = life.state
    for event in (EngineLoaded(), DrainAsked(), WorkFinished(), EngineDied("later")):
        assert not life.handle(event)
    assert life.state is stage


def test_only_a_ready_replica_with_room_takes_work() -> None:
    assert admit(LifeState.READY, 9, 10) is None
    refusals = {
        LifeState.READY: FailureKind.OVERLOADED,
        LifeState.STARTING: FailureKind.OVERLOADED,
        LifeState.DRAINING: FailureKind.DRAINING,
        LifeState.STOPPED: FailureKind.DRAINING,
        LifeState.FAILED: FailureKind.ENGINE,
    }
    for stage, kind in refusals.items():
        refusal = admit(stage, 10, 10)
        assert refusal is not None
        assert refusal.kind is kind


def test_standing_still_counts_only_with_work_in_hand() -> None:
    assert stalled(True, now_s=100.0, progress_at_s=30.0, stall_after_s=60.0)
    assert not stalled(True, now_s=90.0, progress_at_s=30.0, stall_after_s=60.0)
    assert not stalled(False, now_s=1e6, progress_at_s=0.0, stall_after_s=60.0)


def test_every_stage_has_a_status_and_a_stall_is_an_error() -> None:
    assert {published_status(stage, False) for stage in LifeState} == set(ReplicaStatus)
    assert {published_status(stage, True) for stage in LifeState} == {ReplicaStatus.ERROR}
    assert [stage for stage in LifeState if published_status(stage, False) is ReplicaStatus.UP] == [LifeState.READY]


def test_a_debugger_shows_the_state_and_why() -> None:
    assert repr(after(EngineLoaded())) == "Lifecycle(READY)"
    assert repr(after(EngineDied("out of memory"))) == "Lifecycle(FAILED: out of memory)"
