"""The state diagram of docs/architecture.md, made by driving the machine of a request through all that can happen.

``python -m tests.support.state_diagram`` writes it into the page; ``unit/hub/request/test_state_diagram``
fails where the page differs from the code.
"""

from __future__ import annotations

import copy
import functools
import typing
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from unittest import mock

import msgspec

from hub.request import events as ev
from hub.request.machine import RequestMachine
from hub.request.plan import StageGraph
from hub.request.state import Phase, RequestState, StageRun
from omni_discovery import wire
from omni_discovery.deploy.document import parse_deploy
from omni_discovery.errors import EngineFailedError
from tests.support.request_walk import PAIR, Heard, accepted, apply, chunk, done, failed, heard, rejected, taken

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
BEGIN: Final = "<!-- the state diagram: written by python -m tests.support.state_diagram -->"
END: Final = "<!-- the end of the state diagram -->"

_OVER: Final = "OVER"
_ALL_SETTLED: Final = "the last stage is done or skipped"
ENDS: Final = {"Cancelled", "CompanionFailed", "DeadlinePassed"}
_LOSSES: Final = {
    "Rejected",
    "ReplicaLost",
    "StageFailed",
    "StageDone, given up",
    "StageDone too early",
    "a SegmentDone too many",
    "a gap in the output",
}
_PLAIN_ENDS: Final = {"StageDone", "StageDone without hand-off"}

Edges = dict[tuple[str, str], set[str]]
Said = tuple[str, ev.Event | Heard]


def kinds_of_events() -> set[type[Any]]:
    """Every class of event, and of answers of replicas, that a machine takes."""
    return set(_flat(ev.Event)) | set(_flat(ev.StageMessage))


def _flat(union: Any) -> Iterator[type[Any]]:
    parts = typing.get_args(union)
    if not parts:
        yield union
    for part in parts:
        yield from _flat(part)


def said_of_stage(machine: RequestMachine, run: StageRun) -> list[Said]:
    """All that can be said of a stage's present attempt, with a name for each."""
    stage_id, attempt = run.stage_id, run.attempt
    replica = ev.ReplicaRef(stage_id, 0, 7, f"tcp://{stage_id}:1")
    if run.replica is None:
        return [
            ("Sent", ev.Sent(stage_id, attempt, replica)),
            ("FoundInnocent", ev.FoundInnocent(stage_id, attempt)),
            ("TriedTogether", ev.TriedTogether(stage_id, attempt)),
            ("ReplicaLost", ev.ReplicaLost(stage_id, attempt, "not sent", may_have_run=False)),
            ("StageUnavailable", ev.StageUnavailable(stage_id, attempt, "nobody")),
            ("DispatchRefused", ev.DispatchRefused(stage_id, attempt, "no frame holds it")),
        ]
    seq, to, kinds = run.next_seq, [stage_id + 1], wire.FailureKind
    said: list[Said] = [
        ("Accepted", accepted(stage_id, attempt)),
        ("Rejected", rejected(stage_id, attempt, kinds.OVERLOADED, "full")),
        ("Rejected", rejected(stage_id, attempt, kinds.INVALID, "wrong")),
        ("Chunk", heard(stage_id, attempt, chunk(seq, "x", [1]))),
        ("Chunk", heard(stage_id, attempt, chunk(seq, ""), [b"PNG"])),
        ("a gap in the output", heard(stage_id, attempt, chunk(seq + 1))),
        ("StageDone", heard(stage_id, attempt, _done(run, seq, to))),
        ("StageDone without hand-off", heard(stage_id, attempt, _done(run, seq))),
        ("StageDone, given up", heard(stage_id, attempt, _done(run, seq, reason="abort"))),
        ("StageFailed", failed(stage_id, attempt, kinds.INVALID, "wrong")),
        ("StageFailed", failed(stage_id, attempt, kinds.PAYLOAD, "no hand-off")),
        ("ReplicaLost", ev.ReplicaLost(stage_id, attempt, "it died")),
        ("SessionBack", ev.SessionBack(stage_id, attempt)),
    ]
    if machine.segments is not None:
        said.append(("SegmentDone", heard(stage_id, attempt, _segment_done(run))))
    if run.stage_id == 0:
        said.append(("HandOffPiece", heard(stage_id, attempt, _piece(run))))
    elif run.streams:
        said.append(("PieceTaken", taken(stage_id, attempt, stage_id - 1, 0)))
    return said


def _done(run: StageRun, seq: int, to: Sequence[int] = (), reason: str = "stop") -> wire.StageDone:
    return msgspec.structs.replace(done(run.stage_id, seq, to, reason), pieces=run.next_piece)


def _ref(from_stage: int) -> wire.PayloadRef:
    return wire.PayloadRef(from_stage=from_stage, to_stage=from_stage + 1, key="k", connector="shm", size_bytes=1)


def _piece(run: StageRun) -> wire.HandOffPiece:
    return wire.HandOffPiece(
        epoch=7,
        request_id="r1",
        attempt=run.attempt,
        number=run.next_piece,
        payloads=(_ref(run.stage_id),),
        queue_length=0,
    )


def _segment_done(run: StageRun) -> wire.SegmentDone:
    return wire.SegmentDone(
        epoch=7,
        request_id="r1",
        attempt=run.attempt,
        seq=run.next_seq,
        segment=0,
        finish_reason="stop",
        queue_length=0,
        payloads=(_ref(run.stage_id),),
    )


def said_of_request() -> list[Said]:
    """All that can be said of a request as a whole."""
    return [
        ("Submitted", ev.Submitted()),
        ("Segment", ev.SegmentArrived({"prompt": "y"})),
        ("the last Segment", ev.SegmentArrived(None)),
        ("ClientBackpressure", ev.ClientBackpressure(is_behind=True)),
        ("CompanionDone", ev.CompanionDone("negative", (_ref(0),))),
        ("CompanionFailed", ev.CompanionFailed("negative", EngineFailedError("it broke"))),
        ("DeadlinePassed", ev.DeadlinePassed()),
        ("Cancelled", ev.Cancelled()),
    ]


def machines() -> list[RequestMachine]:
    """A request of two stages: both shown or one, in pieces, in segments, with a companion, and as a companion."""
    graph = StageGraph(parse_deploy(PAIR, "diagram.yaml"))

    def machine(*modalities: str, in_pieces: bool = False, attempts: int = 2, **more: Any) -> RequestMachine:
        plan = graph.plan(modalities or None, in_pieces)
        return RequestMachine(RequestState("r1", {"prompt": "x"}, plan, graph.merge_params(None), attempts, **more))

    with_companion = machine("image", companions={"negative": {"prompt": ""}})
    return [
        *(machine(), machine("image"), machine("image", in_pieces=True), machine("image", segmented=True, attempts=1)),
        *(with_companion, machine("image", is_companion=True)),
    ]


def key_of(machine: RequestMachine) -> tuple[Any, ...]:
    """Machines of equal keys go on alike, as far as phases are concerned."""
    return tuple(
        (
            *(run.phase, run.replica is None, run.attempt > 0, min(run.next_seq, 1), min(run.skip, 1)),
            *(run.seen.kind, run.seen.ended, bool(run.handed), min(run.next_piece, 1), bool(run.streams)),
            *_segment_key(machine, run.stage_id),
        )
        for run in machine.runs.values()
    )


def _segment_key(machine: RequestMachine, stage_id: int) -> tuple[Any, ...]:
    segments = machine.segments
    if segments is None:
        return ()
    is_over, is_ending, is_idle = segments.is_over, segments.is_ending, segments.is_idle
    return (segments.is_complete, segments.waits, is_over(stage_id), is_ending(stage_id), is_idle(stage_id))


def kinds_told() -> set[type[Any]]:
    """Every class of event that the machines are told."""
    return _walk()[1]


def steps() -> set[tuple[Phase, Phase]]:
    """Every change of a phase that the machines ask ``StageRun.to`` for: one event may ask for several."""
    return _walk()[2]


def edges() -> Edges:
    """Every change of a stage's phase, and what brought it about."""
    return _walk()[0]


@functools.cache
def _walk() -> tuple[Edges, set[type[Any]], set[tuple[Phase, Phase]]]:
    asked: set[tuple[Phase, Phase]] = set()
    to = StageRun.to

    def noted(run: StageRun, phase: Phase) -> None:
        asked.add((run.phase, phase))
        to(run, phase)

    with mock.patch.object(StageRun, "to", noted):
        return *_drive(), asked


def _drive() -> tuple[Edges, set[type[Any]]]:
    found: Edges = defaultdict(set)
    told: set[type[Any]] = set()
    for start in machines():
        seen, left = {key_of(start)}, [start]
        while left:
            machine = left.pop()
            for name, event in said_of(machine):
                after = copy_of(machine)
                actions = apply(after, event, 1.0)
                told.add(type(event.message if isinstance(event, Heard) else event))
                _note(found, machine, after, (name, event), actions)
                if not after.finished and key_of(after) not in seen:
                    seen.add(key_of(after))
                    left.append(after)
    return found, told


def copy_of(machine: RequestMachine) -> RequestMachine:
    """Another one that stands where this one does; what never changes is shared, or this would take long."""
    plan, state = machine.state.plan, machine.state.public
    shared = [plan, machine.story, machine.state.params, state.prompt, state.sampling_params_list, *_refs(machine)]
    return copy.deepcopy(machine, {id(each): each for each in shared})


def _refs(machine: RequestMachine) -> Iterator[object]:
    for run in machine.runs.values():
        yield from (each for refs in run.handed.values() for each in refs)
        yield from (run.replica, run.failure, *run.holders.values())


def said_of(machine: RequestMachine) -> list[Said]:
    """All that can be said to a machine as it is now."""
    running = [run for run in machine.runs.values() if run.running]
    return said_of_request() + [each for run in running for each in said_of_stage(machine, run)]


def _note(found: Edges, before: RequestMachine, after: RequestMachine, said: Said, actions: list[ev.Action]) -> None:
    name, event = said
    of_stage: int | None = getattr(event, "stage_id", None)
    if name in _PLAIN_ENDS and of_stage is not None and after.runs[of_stage].phase is not Phase.DONE:
        name = "StageDone too early"
    if name == "SegmentDone" and of_stage is not None and after.runs[of_stage].phase is not Phase.ACCEPTED:
        name = "a SegmentDone too many"
    ends = [action for action in actions if isinstance(action, ev.Finish)]
    for stage_id, run in before.runs.items():
        now, is_own = after.runs[stage_id], of_stage == stage_id
        if ends and ends[0].outcome is not ev.Outcome.OK:
            found[run.phase.name, _OVER].add(name if name in ENDS or is_own else "the request fails")
            continue
        is_news = name == "Chunk" or run.attempt != now.attempt
        if run.phase is not now.phase or (is_news and is_own):
            found[run.phase.name, now.phase.name].add(_label(name, of_stage, stage_id))
        if ends:
            found[now.phase.name, _OVER].add(_ALL_SETTLED)


def _label(name: str, of_stage: int | None, stage_id: int) -> str:
    if of_stage is None or of_stage == stage_id:
        return name
    said = "a loss" if name in _LOSSES else name
    return said + (" of the stage before" if of_stage < stage_id else " of a later stage")


def diagram() -> str:
    """The diagram as Mermaid has it."""
    found = edges()
    lines = ["```mermaid", "stateDiagram-v2", "    direction LR", "    [*] --> WAITING"]
    for (source, target), names in sorted(found.items()):
        lines.append(f"    {source} --> {target}: {'<br/>'.join(sorted(names))}")
    return "\n".join([*lines, f"    {_OVER} --> [*]", "```"])


def page_with(text: str, made: str) -> str:
    """The page with the diagram between its marks."""
    head, found_begin, rest = text.partition(BEGIN)
    _, found_end, tail = rest.partition(END)
    if not found_begin or not found_end:
        raise ValueError(f"{PAGE} has no marks for the diagram")
    return f"{head}{BEGIN}\n{made}\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text(), diagram()))
