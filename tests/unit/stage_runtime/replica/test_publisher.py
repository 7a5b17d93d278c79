"""What is published of a replica, by a thread that nothing ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest

from omni_discovery.records.schema import ReplicaStatus
from stage_runtime.lifecycle import LifeState
from stage_runtime.replica.publisher import ReplicaSnapshot, StatusPublisher
from stage_runtime.status_pipe import Exiting, StatusMessage
from stage_runtime.supervisor.restarts import EXIT_DRAINED, EXIT_FAILED


class Client:
    """Notes what is published; may be told to refuse."""

    def __init__(self) -> None:
        self.published: list[tuple[ReplicaStatus | None, int | None]] = []
        self.described: list[dict[str, Any]] = []
        self.refuses = False

    def update_info(self, status: ReplicaStatus | None = None, queue_length: int | None = None) -> None:
        if self.refuses:
            raise OSError("no")
        self.published.append((status, queue_length))

    def describe(self, **fields: Any) -> None:
        self.described.append(fields)

    def close(self) -> None:
        raise AssertionError("it is not the publisher's to close")

    awaited_hubs = None


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 5.0
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


class Scene:
    def __init__(self) -> None:
        self.client = Client()
        self.look = ReplicaSnapshot(LifeState.READY, 0, is_stalled=False, is_hopeless=False)
        self.ended_with: list[int] = []
        self.told: list[StatusMessage] = []
        self.publisher = StatusPublisher(
            self.client, self._see, 0, "it stands", self.ended_with.append, self.told.append
        )

    def _see(self) -> ReplicaSnapshot:
        return self.look


def test_changes_are_published_once_and_the_last_words_are_left_to_others() -> None:
    scene = Scene()
    scene.publisher.start()
    until(lambda: scene.client.published == [(ReplicaStatus.UP, 0)])
    scene.look = ReplicaSnapshot(LifeState.DRAINING, 2, is_stalled=False, is_hopeless=False)
    until(lambda: scene.client.published[1:] == [(ReplicaStatus.DRAINING, 2)])
    scene.look = ReplicaSnapshot(LifeState.STOPPED, 0, is_stalled=False, is_hopeless=False)
    time.sleep(0.2)
    scene.publisher.stop()
    assert len(scene.client.published) == 2


def test_a_replica_that_sleeps_is_not_up_and_says_why_until_it_is_awake() -> None:
    scene = Scene()
    scene.publisher.start()
    until(lambda: scene.client.published == [(ReplicaStatus.UP, 0)])
    scene.look = ReplicaSnapshot(LifeState.ASLEEP, 0, is_stalled=False, is_hopeless=False)
    until(lambda: scene.client.published[1:] == [(ReplicaStatus.STARTING, 0)])
    scene.look = ReplicaSnapshot(LifeState.READY, 0, is_stalled=False, is_hopeless=False)
    until(lambda: scene.client.published[2:] == [(ReplicaStatus.UP, 0)])
    scene.publisher.stop()
    assert scene.client.described == [{"phase": "asleep"}, {"phase": "ready"}]


def test_what_can_not_be_published_is_counted_said_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """1. publishing raises, again and again: one line says so; 2. it works again: the same change is out, and said."""
    caplog.set_level(logging.INFO)
    scene = Scene()
    scene.client.refuses = True
    scene.publisher.start()
    until(lambda: scene.publisher.failures >= 3)
    scene.client.refuses = False
    until(lambda: scene.client.published == [(ReplicaStatus.UP, 0)])
    scene.publisher.stop()
    events = [record.getMessage().split()[0] for record in caplog.records]
    assert events == ["replica.not_published", "replica.published_again"]


def test_a_stall_is_told_with_its_reason_taken_back_and_ended_when_there_is_no_hope() -> None:
    scene = Scene()
    scene.look = ReplicaSnapshot(LifeState.READY, 1, is_stalled=True, is_hopeless=False)
    scene.publisher.start()
    until(lambda: scene.client.published == [(ReplicaStatus.ERROR, 1)])
    assert scene.client.described == [{"reason": "it stands"}]
    assert scene.ended_with == []
    scene.look = ReplicaSnapshot(LifeState.READY, 1, is_stalled=False, is_hopeless=False)
    until(lambda: scene.client.published[1:] == [(ReplicaStatus.UP, 1)])
    assert scene.client.described[1:] == [{"reason": ""}]
    scene.look = ReplicaSnapshot(LifeState.READY, 1, is_stalled=True, is_hopeless=True)
    until(lambda: EXIT_FAILED in scene.ended_with)
    assert scene.told[0] == Exiting("it stands")
    scene.publisher.stop()


@pytest.mark.parametrize(
    ("state", "is_drained", "told", "code"),
    [
        (LifeState.READY, False, "to be started anew", EXIT_FAILED),
        (LifeState.DRAINING, False, "it was draining", EXIT_FAILED),
        (LifeState.DRAINING, True, "it was draining", EXIT_DRAINED),
    ],
)
def test_one_that_hangs_while_it_drains_does_not_say_that_it_comes_back(
    caplog: pytest.LogCaptureFixture, state: LifeState, is_drained: bool, told: str, code: int
) -> None:
    """One that an operator has drained stays down, as if it had come to its end."""
    scene = Scene()
    scene.look = ReplicaSnapshot(state, 1, is_stalled=True, is_hopeless=True, requests="r1", is_drained=is_drained)
    scene.publisher.start()
    until(lambda: scene.ended_with != [])
    scene.publisher.stop()
    assert scene.ended_with[0] == code
    lines = [line for line in caplog.messages if line.startswith("replica.hopeless")]
    assert lines[0] == f"replica.hopeless stage=0 requests=r1: it stands; ending, {told}"
