"""The supervisors beside a hub: who is started again, who stays down, and who ends the hub."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hub.serve import local_stages
from hub.serve.local_stages import LocalStages, StageEnd
from omni_discovery.backoff import RestartPauses
from omni_discovery.commands.stage_options import StageOptions
from omni_discovery.metrics.samples import ReplicaSample, encode_sample
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from omni_discovery.stories import Waits, read_waits
from omni_discovery.view.table import View

UP = ReplicaInfo("tcp://h:1", "tcp://h:2", 0, ReplicaStatus.UP, 0, 0.0, 0.0, 0, epoch=8)


class FakeChild:
    """A supervisor that runs until ``code`` is set."""

    def __init__(self, command: list[str], **_: Any) -> None:
        self.command = command
        self.code: int | None = None
        self.signals: list[int] = []

    def poll(self) -> int | None:
        return self.code

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


class Bench:
    """Local stages over fakes, on a clock that is moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.view = 100.0, View(revision=7)
        self.children: list[FakeChild] = []
        #: On which the supervisor that was started last sends its samples.
        self.samples: socket.socket | None = None
        monkeypatch.setattr(local_stages.subprocess, "Popen", self.spawn)
        self.stages = LocalStages(lambda: self.view, now=lambda: self.now_s)
        self.stages.start((StageOptions(stage_id=0, count=2, endpoints="e:1"),))

    def spawn(self, command: list[str], **options: Any) -> FakeChild:
        assert options["start_new_session"]
        _, samples_fd = options["pass_fds"]
        if self.samples is not None:
            self.samples.close()
        self.samples = socket.socket(fileno=os.dup(samples_fd))
        self.children.append(FakeChild(command))
        return self.children[-1]

    def list(self, info: ReplicaInfo) -> None:
        self.view = View(replicas={(info.stage_id, info.replica_id): info}, revision=info.epoch + 1)

    def end(self, code: int) -> list[StageEnd]:
        self.children[-1].code = code
        return self.stages.restart_ended()

    def pause_s(self) -> float:
        """How long it takes until the next one is started."""
        began_s, before = self.now_s, len(self.children)
        while len(self.children) == before:
            assert self.stages.restart_ended() == []
            self.now_s += 0.25
            assert self.now_s < began_s + 100.0
        return self.now_s - 0.25 - began_s


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(monkeypatch)
    yield made
    if made.samples is not None:
        made.samples.close()
    for supervised in made.stages._running:
        supervised.close_samples()


@pytest.mark.parametrize("code", [-signal.SIGKILL, 1])
def test_a_supervisor_that_was_killed_or_failed_is_started_again_after_growing_pauses(
    bench: Bench, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """1. it ends again and again, never up; 2. it serves for over a minute and ends: the first pause again"""
    pauses = []
    for _ in range(8):
        assert bench.end(code) == [StageEnd(0, code, was_up=False)]
        pauses.append(bench.pause_s())
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert {tuple(child.command) for child in bench.children} == {tuple(bench.children[0].command)}
    bench.list(replace(UP, epoch=9))
    assert bench.stages.restart_ended() == []
    bench.now_s += 61.0
    assert bench.end(code) == [StageEnd(0, code, was_up=True)]
    assert bench.pause_s() == 0.5
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 9
    assert errors[0] == f"stage.ended stage=0 exit_code={code} next_try_s=0.5: its supervisor is started again then"


@pytest.mark.parametrize("code", [0, 2])
def test_one_that_was_drained_or_is_misconfigured_stays_down(bench: Bench, code: int) -> None:
    bench.list(UP)
    bench.stages.restart_ended()
    (end,) = bench.end(code)
    assert not end.is_refusal
    bench.now_s += 3600.0
    assert bench.stages.restart_ended() == []
    assert len(bench.children) == 1


def test_only_what_never_was_up_here_is_a_refusal(bench: Bench) -> None:
    """A replica of the stage that is older than our supervisor is another host's; a newer one is another stage's."""
    bench.list(replace(UP, epoch=7))
    assert bench.stages.restart_ended() == []
    bench.list(replace(UP, stage_id=1, epoch=9))
    (end,) = bench.end(2)
    assert end.is_refusal


def test_a_start_that_the_machine_refuses_is_tried_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.end(1)

    def refuse(*_: Any, **__: Any) -> FakeChild:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(local_stages.subprocess, "Popen", refuse)
    bench.now_s += 1.0
    assert bench.stages.restart_ended() == []
    monkeypatch.setattr(local_stages.subprocess, "Popen", bench.spawn)
    assert bench.pause_s() == 1.0


def test_a_stage_that_is_to_be_started_again_is_told_as_waiting(tmp_path: Path, bench: Bench) -> None:
    home = tmp_path / "omni"
    home.mkdir(mode=0o700)
    bench.stages.waits = Waits(home, "n", "e:1")
    bench.end(1)
    (wait,) = read_waits(home, "n")
    assert (wait.who, wait.reason) == (
        "the hub with its local stage 0",
        "its supervisor ended with exit code 1 and is started again after 0.5 s",
    )
    bench.now_s += 60.0
    bench.stages.restart_ended()
    assert read_waits(home, "n") == []


def send(bench: Bench, content: bytes) -> None:
    assert bench.samples is not None
    bench.samples.send(content)


def replicas_shown(bench: Bench) -> tuple[int, set[tuple[int, int]]]:
    """How many replicas of stage 0 are wanted, and which have told of themselves."""
    found = bench.stages.samples()
    return found.supervisors[0].wanted, set(found.replicas)


def test_samples_are_shown_until_their_supervisor_ends(bench: Bench) -> None:
    """1. none yet, but two replicas are wanted; 2. one tells of itself, and somebody sends nonsense
    3. the supervisor ends: its replicas are forgotten, and still wanted; 4. the next one tells of them again
    """
    assert replicas_shown(bench) == (2, set())
    send(bench, encode_sample(ReplicaSample(stage_id=0, replica_id=1)))
    send(bench, b"nonsense")
    assert replicas_shown(bench) == (2, {(0, 1)})
    bench.end(1)
    assert replicas_shown(bench) == (2, set())
    bench.pause_s()
    send(bench, encode_sample(ReplicaSample(stage_id=0, replica_id=0)))
    assert replicas_shown(bench) == (2, {(0, 0)})


def test_replicas_that_an_operator_has_drained_are_not_wanted(bench: Bench) -> None:
    bench.list(UP)
    bench.stages.restart_ended()
    bench.end(0)
    assert replicas_shown(bench) == (0, set())


def test_pauses_stay_bounded_however_often_it_ended() -> None:
    pauses = RestartPauses()
    assert {pauses.ended(0.0) for _ in range(3000)} == {0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0}
    assert pauses.ended(60.0) == 0.5


def test_whoever_is_to_hurry_is_told_so_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor that drains at the first signal goes at the second: with ``hurry`` nobody waits a minute for it."""
    text = (
        "import signal, sys\nseen = []\ndef on(*_):\n    seen.append(1)\n    len(seen) > 1 and sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, on)\nprint(flush=True)\nwhile True: signal.pause()"
    )
    spawned: list[subprocess.Popen[bytes]] = []

    def spawn(_: list[str], **__: Any) -> subprocess.Popen[bytes]:
        spawned.append(popen([sys.executable, "-S", "-c", text], stdout=subprocess.PIPE))
        return spawned[-1]

    popen = subprocess.Popen
    monkeypatch.setattr(local_stages.subprocess, "Popen", spawn)
    stages = LocalStages(View)
    stages.start((StageOptions(stage_id=0, endpoints="e:1"),))
    assert spawned[0].stdout is not None
    with spawned[0].stdout as output:
        output.readline()
    stages.hurry()
    stages.stop()
    assert spawned[0].returncode == 0
