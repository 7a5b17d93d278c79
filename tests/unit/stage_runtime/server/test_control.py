"""Control calls in a replica: what the ZMQ thread lets through, once each, and whom it answers."""

from __future__ import annotations

from collections import Counter

import pytest

from omni_discovery import wire
from omni_discovery.wire.session import Peer
from stage_runtime.engine_loop.jobs import Call, Called
from stage_runtime.lifecycle import LifeState, admit, published_status
from stage_runtime.server.control import ControlCalls

HUB, OTHER = Peer("hub-1/aaa", "hub-1"), Peer("hub-2/bbb", "hub-2")


class Desk:
    """The ZMQ thread's part, with what it said."""

    def __init__(self) -> None:
        self.own = LifeState.READY
        self.counters: Counter[str] = Counter()
        self.said: list[tuple[Peer, wire.ControlResult]] = []
        self.calls = ControlCalls(lambda: self.own, lambda: 3, self.counters, lambda *what: self.said.append(what))

    def take(self, call_id: str, method: str = "list_loras", peer: Peer = HUB) -> list[Call]:
        control = wire.Control(epoch=7, call_id=call_id, method=method, args=(1,), kwargs={"a": 2}, remaining_s=5.0)
        return self.calls.accept_call(peer, control, 10.0)


def test_a_call_is_passed_on_once_and_its_answer_goes_to_who_asked() -> None:
    desk = Desk()
    (job,) = desk.take("c~1")
    assert (job.method, job.args, job.kwargs, job.deadline_s) == ("list_loras", (1,), {"a": 2}, 15.0)
    assert desk.take("c~1") == []
    (other,) = desk.take("c~1", peer=OTHER)
    assert other.key != job.key
    assert desk.counters["replayed_calls"] == 1
    desk.calls.finish_call(Called(job.key, ok=True, result=[5]))
    desk.calls.finish_call(Called(job.key, ok=True, result=[6]))
    answer = wire.ControlResult(epoch=7, call_id="c~1", ok=True, queue_length=3, result=[5])
    assert desk.said == [(HUB, answer)]
    assert desk.take("c~1") == []
    assert desk.calls.calling_peers() == [OTHER]


def test_nothing_is_taken_from_the_call_for_sleep_until_the_engine_says_that_it_is_awake() -> None:
    """1. sleep is asked: asleep at once; 2. a second one fails, the first succeeds: asleep; 3. woken: ready
    4. sleep that fails: ready again; 5. an engine that fell asleep although the call failed: asleep
    """
    desk = Desk()
    (first,), (second,) = desk.take("a", "sleep"), desk.take("b", "sleep")
    assert desk.calls.life_state() is LifeState.ASLEEP
    desk.calls.finish_call(Called(second.key, ok=False, error="no", is_asleep=False))
    assert desk.calls.life_state() is LifeState.ASLEEP
    desk.calls.finish_call(Called(first.key, ok=True, is_asleep=True))
    assert desk.calls.life_state() is LifeState.ASLEEP
    (wake,) = desk.take("c", "wake_up")
    desk.calls.finish_call(Called(wake.key, ok=True, is_asleep=False))
    assert desk.calls.life_state() is LifeState.READY
    (again,) = desk.take("d", "sleep")
    desk.calls.finish_call(Called(again.key, ok=False, error="late"))
    assert desk.calls.life_state() is LifeState.READY
    (half,) = desk.take("e", "sleep")
    desk.calls.finish_call(Called(half.key, ok=False, error="no", is_asleep=True))
    assert desk.calls.life_state() is LifeState.ASLEEP
    desk.own = LifeState.DRAINING
    assert desk.calls.life_state() is LifeState.DRAINING


def test_a_replica_that_sleeps_refuses_work_and_is_not_up_in_the_registry() -> None:
    refusal = admit(LifeState.ASLEEP, 0, 10)
    assert refusal is not None
    assert (refusal.kind, refusal.reason) == (wire.FailureKind.DRAINING, "the replica is asleep")
    assert published_status(LifeState.ASLEEP, is_stalled=False).value == "starting"


@pytest.mark.parametrize(
    ("stage", "reason"),
    [(LifeState.STARTING, "still loading"), (LifeState.FAILED, "engine is gone"), (LifeState.STOPPED, "gone")],
)
def test_a_replica_without_an_engine_says_so_at_once(stage: LifeState, reason: str) -> None:
    desk = Desk()
    desk.own = stage
    assert desk.take("c") == []
    ((peer, answer),) = desk.said
    assert (peer, answer.call_id, answer.ok) == (HUB, "c", False)
    assert answer.error.startswith("ControlRefusedError: ")
    assert reason in answer.error


def test_open_calls_are_bounded() -> None:
    desk = Desk()
    for number in range(64):
        assert len(desk.take(f"c{number}")) == 1
    assert desk.take("one more") == []
    assert "64 calls are open" in desk.said[-1][1].error
    desk.calls.finish_call(Called("#1", ok=True))
    assert len(desk.take("now")) == 1


def test_a_hub_that_is_given_up_gets_no_answers_and_its_sleep_counts_until_the_engine_has_answered() -> None:
    desk = Desk()
    (job,), (behind,) = desk.take("c", "sleep"), desk.take("e")
    desk.take("d", peer=OTHER)
    assert desk.calls.drop_calls(HUB.name) == [behind.key, job.key]
    assert desk.calls.calling_peers() == [OTHER]
    assert desk.calls.life_state() is LifeState.ASLEEP
    desk.calls.finish_call(Called(job.key, ok=False, error="nobody waits"))
    assert desk.calls.life_state() is LifeState.READY
    assert desk.said == []


def test_calls_are_remembered_up_to_a_bound_the_latest_longest() -> None:
    """1. 8192 calls, each run at once: the first is still known; 2. one more, and it is not, the second is."""
    desk = Desk()
    for number in range(8192):
        for job in desk.take(f"c{number}"):
            desk.calls.finish_call(Called(job.key, ok=True))
    assert desk.take("c0") == []
    assert len(desk.take("c8192")) == 1
    assert desk.take("c1") == []
    assert len(desk.take("c0")) == 1


def test_a_call_whose_hub_was_given_up_is_not_dropped_again() -> None:
    desk = Desk()
    desk.take("c")
    (other,) = desk.take("d", peer=OTHER)
    assert len(desk.calls.drop_calls(HUB.name)) == 1
    assert desk.calls.drop_calls(HUB.name) == []
    assert desk.calls.drop_calls(OTHER.name) == [other.key]
