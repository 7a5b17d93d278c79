"""A RequestMachine with a clock, and short ways to tell it what happens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from hub.request import events as ev
from hub.request.machine import RequestMachine
from hub.request.plan import StageGraph
from hub.request.state import RequestState
from omni_discovery import wire
from omni_discovery.deploy.document import parse_deploy
from omni_discovery.wire import FailureKind

PAIR = "stages: [{stage_id: 0, engine: e, final_output: text}, {stage_id: 1, engine: e, final_output: image}]"
BRANCHING = """
stages:
  - {stage_id: 0, engine: e, final_output: text}
  - {stage_id: 1, engine: e, input_from: [0], final_output: image}
  - {stage_id: 2, engine: e, input_from: [0]}
  - {stage_id: 3, engine: e, input_from: [1, 2], final_output: audio}
"""


class Heard(NamedTuple):
    """An answer of a stage's replica, as it comes off the wire."""

    stage_id: int
    message: ev.StageMessage
    attachments: Sequence[bytes] = ()


def apply(machine: RequestMachine, event: ev.Event | Heard, now_s: float) -> list[ev.Action]:
    """Tell a machine of an event, or of what a replica says."""
    if isinstance(event, Heard):
        return machine.handle_message(event.stage_id, event.message, now_s, event.attachments)
    return machine.handle(event, now_s)


class Walk:
    """A machine with a clock, and short ways to tell it things."""

    def __init__(
        self,
        deploy: str = PAIR,
        modalities: Sequence[str] | None = None,
        attempts: int = 3,
        params: dict[str, Any] | None = None,
        priority: int = 0,
        companions: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        graph = StageGraph(parse_deploy(deploy, "test.yaml"))
        plan = graph.plan(modalities)
        merged = graph.merge_params({0: {"seed": 1} if params is None else params})
        state = RequestState("r1", {"prompt": "hi"}, plan, merged, attempts, priority=priority, companions=companions)
        self.machine = RequestMachine(state)
        self.now_s = 0.0
        self.actions: list[ev.Action] = []
        #: The stages whose replicas declare that they are deterministic.
        self.deterministic: set[int] = set()

    def tell(self, event: ev.Event | Heard) -> list[ev.Action]:
        self.now_s += 1.0
        actions = apply(self.machine, event, self.now_s)
        self.actions += actions
        return actions

    def attempt(self, stage_id: int) -> int:
        return self.machine.runs[stage_id].attempt

    def sent(self, stage_id: int, replica_id: int = 0) -> list[ev.Action]:
        replica = ev.ReplicaRef(stage_id, replica_id, 7, f"tcp://{stage_id}-{replica_id}:1")
        return self.tell(ev.Sent(stage_id, self.attempt(stage_id), replica, stage_id in self.deterministic))

    def accepted(self, stage_id: int, replica_id: int = 0) -> list[ev.Action]:
        self.sent(stage_id, replica_id)
        return self.tell(accepted(stage_id, self.attempt(stage_id)))

    def chunk(
        self,
        stage_id: int,
        seq: int,
        text: str = "x",
        attempt: int | None = None,
        token_ids: Sequence[int] = (),
        attachments: Sequence[bytes] = (),
    ) -> list[ev.Action]:
        number = self.attempt(stage_id) if attempt is None else attempt
        return self.tell(heard(stage_id, number, chunk(seq, text, token_ids), attachments))

    def words(self, stage_id: int, *words: str) -> list[ev.Action]:
        """Each word is one chunk with one token id: its length."""
        first = self.machine.runs[stage_id].next_seq
        return [
            action
            for seq, word in enumerate(words, first)
            for action in self.chunk(stage_id, seq, word, token_ids=[len(word)])
        ]

    def done(self, stage_id: int, seq: int, to: Sequence[int] = (), reason: str = "stop") -> list[ev.Action]:
        return self.tell(heard(stage_id, self.attempt(stage_id), done(stage_id, seq, to, reason)))

    def lost(self, stage_id: int, **more: Any) -> list[ev.Action]:
        return self.tell(ev.ReplicaLost(stage_id, self.attempt(stage_id), "it died", **more))

    def failed(self, stage_id: int, kind: FailureKind, reason: str = "it broke") -> list[ev.Action]:
        return self.tell(failed(stage_id, self.attempt(stage_id), kind, reason))

    def rejected(self, stage_id: int, kind: FailureKind) -> list[ev.Action]:
        return self.tell(rejected(stage_id, self.attempt(stage_id), kind, "no"))


def heard(stage_id: int, attempt: int, message: ev.StageMessage, attachments: Sequence[bytes] = ()) -> Heard:
    """A message as an answer to that attempt."""
    return Heard(stage_id, msgspec.structs.replace(message, attempt=attempt), attachments)


def accepted(stage_id: int, attempt: int) -> Heard:
    return Heard(stage_id, wire.Accepted(epoch=7, request_id="r1", queue_length=0, attempt=attempt))


def rejected(stage_id: int, attempt: int, kind: FailureKind, reason: str) -> Heard:
    message = wire.Rejected(epoch=7, request_id="r1", kind=kind, reason=reason, queue_length=0, attempt=attempt)
    return Heard(stage_id, message)


def failed(stage_id: int, attempt: int, kind: FailureKind, reason: str) -> Heard:
    message = wire.StageFailed(epoch=7, request_id="r1", kind=kind, reason=reason, queue_length=0, attempt=attempt)
    return Heard(stage_id, message)


def taken(stage_id: int, attempt: int, from_stage: int, number: int) -> Heard:
    message = wire.PieceTaken(
        epoch=7, request_id="r1", attempt=attempt, from_stage=from_stage, number=number, queue_length=0
    )
    return Heard(stage_id, message)


def chunk(seq: int, text: str = "x", token_ids: Sequence[int] = ()) -> wire.Chunk:
    return wire.Chunk(
        epoch=7, request_id="r1", seq=seq, modality="text", queue_length=0, text=text, token_ids=tuple(token_ids)
    )


def done(stage_id: int, seq: int, to: Sequence[int] = (), reason: str = "stop") -> wire.StageDone:
    payloads = tuple(
        wire.PayloadRef(from_stage=stage_id, to_stage=each, key=f"{stage_id}-{each}", connector="shm", size_bytes=1)
        for each in to
    )
    return wire.StageDone(
        epoch=7, request_id="r1", seq=seq, finish_reason=reason, queue_length=0, payloads=payloads, usage={"n": seq}
    )


def of(actions: Sequence[ev.Action], *kinds: type[Any]) -> list[Any]:
    return [action for action in actions if isinstance(action, kinds)]


def finish_of(actions: Sequence[ev.Action]) -> ev.Finish:
    assert isinstance(actions[-1], ev.Finish)
    return actions[-1]


def at_picture(modalities: Sequence[str] | None = None) -> Walk:
    """Stage 0 is done, stage 1 has accepted."""
    walk = Walk(modalities=modalities)
    walk.tell(ev.Submitted())
    walk.accepted(0)
    walk.chunk(0, 0)
    walk.done(0, 1, to=[1])
    walk.accepted(1)
    return walk
