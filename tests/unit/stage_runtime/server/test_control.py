"""Control calls: once each, bounded, answered to whoever called."""

from __future__ import annotations

from collections import Counter

import pytest

from omni_discovery import wire
from omni_discovery.wire.session import Peer
from stage_runtime.engine_loop.jobs import SLEEP, Called
from stage_runtime.lifecycle import LifeState
from stage_runtime.server.control import ControlCalls

PEER = Peer("h1/a", "h1")
OTHER = Peer("h2/a", "h2")


class Calls(ControlCalls):
    """The calls of a replica that is ready, with a load of 3, and the answers that it sent."""

    def __init__(self) -> None:
        self.state = LifeState.READY
        self.answers: list[tuple[Peer, wire.ControlResult]] = []
        self.counts: Counter[str] = Counter()
        super().__init__(lambda: self.state, lambda: 3, self.counts, lambda *answer: self.answers.append(answer))

    def call(self, call_id: str, method: str = "ping", peer: Peer = PEER) -> list[str]:
        control = wire.Control(epoch=5, call_id=call_id, method=method, remaining_s=7.0)
        return [call.key for call in self.accept_call(peer, control, 100.0)]


def test_a_call_is_run_once_and_answered_once() -> None:
    calls = Calls()
    (call,) = calls.accept_call(PEER, wire.Control(epoch=5, call_id="c", method="m", args=(1,), remaining_s=7.0), 100.0)
    assert (call.method, call.args, call.deadline_s) == ("m", (1,), 107.0)
    assert calls.call("c") == []
    assert calls.counts == {"replayed_calls": 1}
    for _ in range(2):
        calls.finish_call(Called(call.key, ok=True, result=4))
    answer = wire.ControlResult(epoch=5, call_id="c", ok=True, queue_length=3, result=4)
    assert calls.answers == [(PEER, answer)]


def test_the_same_name_from_another_hub_is_another_call() -> None:
    calls = Calls()
    assert len({*calls.call("c"), *calls.call("c", peer=OTHER)}) == 2
    assert calls.calling_peers() == [PEER, OTHER]


def test_calls_are_remembered_up_to_a_bound_the_latest_longest() -> None:
    """1. 8192 calls, each run at once: the first is still known; 2. one more, and it is not, the second is."""
    calls = Calls()
    for number in range(8192):
        for key in calls.call(f"c{number}"):
            calls.finish_call(Called(key, ok=True))
    assert calls.call("c0") == []
    assert calls.call("c8192") != []
    assert calls.call("c1") == []
    assert calls.call("c0") != []


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (LifeState.STARTING, "loading"),
        (LifeState.STOPPED, "gone"),
        (LifeState.FAILED, "gone"),
        (LifeState.DRAINING, ""),
    ],
)
def test_a_replica_without_an_engine_refuses(state: LifeState, reason: str) -> None:
    calls = Calls()
    calls.state = state
    assert len(calls.call("c")) == (not reason)
    assert calls.counts["rejected_calls"] == bool(reason)
    assert all(reason in answer.error and not answer.ok for _, answer in calls.answers)


def test_no_more_than_64_calls_are_open() -> None:
    calls = Calls()
    keys = [key for number in range(65) for key in calls.call(f"c{number}")]
    assert len(keys) == 64
    assert "64 calls are open" in calls.answers[0][1].error
    calls.finish_call(Called(keys[0], ok=True))
    assert calls.call("another") != []


def test_a_replica_sleeps_from_the_call_on_and_until_a_result_says_otherwise() -> None:
    calls = Calls()
    (key,) = calls.call("c", SLEEP)
    assert calls.life_state() is LifeState.ASLEEP
    calls.finish_call(Called(key, ok=False, error="no"))
    assert calls.life_state() is LifeState.READY
    (key,) = calls.call("d", SLEEP)
    calls.finish_call(Called(key, ok=True, is_asleep=True))
    assert calls.life_state() is LifeState.ASLEEP
    calls.state = LifeState.DRAINING
    assert calls.life_state() is LifeState.DRAINING
    calls.state = LifeState.READY
    calls.finish_call(Called("", ok=True, is_asleep=False))
    assert calls.life_state() is LifeState.READY


def test_calls_of_a_lost_connection_are_cancelled_from_the_last_on_and_not_answered() -> None:
    calls = Calls()
    first, second = calls.call("c") + calls.call("d")
    calls.call("e", peer=OTHER)
    assert calls.drop_calls(PEER.name) == [second, first]
    assert calls.drop_calls(PEER.name) == []
    assert calls.calling_peers() == [OTHER]
    calls.finish_call(Called(first, ok=True))
    assert calls.answers == []
