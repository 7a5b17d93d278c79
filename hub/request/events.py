"""The inputs and outputs of a RequestMachine: events, messages of replicas, and actions; all frozen. Pure.

Each event and message about a dispatch carries its ``attempt``; one about an attempt that is over changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from hub.request.outputs import OmniOutput
from omni_discovery import wire
from omni_discovery.errors import RequestError


# Structs: several are made for each request, and a frozen dataclass costs several times as much to make.
class ReplicaRef(msgspec.Struct, frozen=True):
    """One life of one replica: its place in the pipeline, its epoch, and the address of its input socket."""

    stage_id: int
    replica_id: int
    epoch: int
    input_addr: str

    def __str__(self) -> str:
        return f"{self.stage_id}/{self.replica_id}"


def lives_text(replicas: Iterable[ReplicaRef]) -> str:
    """Their names, with how often each occurs: two lives of one replica have one name."""
    counts = Counter(map(str, replicas))
    often = {1: "", 2: " twice"}
    return ", ".join(name + often.get(count, f" {count} times") for name, count in counts.items())


# ---- events of the whole request


class Submitted(msgspec.Struct, frozen=True):
    """The request is admitted: begin."""


class SegmentArrived(msgspec.Struct, frozen=True):
    """The client's next segment; ``inputs`` None: no more come."""

    inputs: Mapping[str, Any] | None


class ClientBackpressure(msgspec.Struct, frozen=True):
    """The client has fallen behind the output that is made for it, or has caught up."""

    is_behind: bool


class CompanionDone(msgspec.Struct, frozen=True):
    """A companion of the request is done and left this hand-off."""

    role: str
    payloads: tuple[wire.PayloadRef, ...]


class CompanionFailed(msgspec.Struct, frozen=True):
    """A companion of the request has failed."""

    role: str
    error: RequestError


class DeadlinePassed(msgspec.Struct, frozen=True):
    """The request's time is over."""


class Cancelled(msgspec.Struct, frozen=True):
    """The client has left or asked to stop; with ``error``, the hub ends the request for a reason of its own."""

    error: RequestError | None = None


# ---- events of one stage's attempt


class Sent(msgspec.Struct, frozen=True):
    """A dispatch has left for a replica. ``deterministic``: its record says that its output can be made again."""

    stage_id: int
    attempt: int
    replica: ReplicaRef
    deterministic: bool = False


class SessionBack(msgspec.Struct, frozen=True):
    """The session of the attempt's replica is up again: messages sent to it before may be lost."""

    stage_id: int
    attempt: int


class ReplicaLost(msgspec.Struct, frozen=True):
    """The dispatch will not be answered.

    ``may_have_run`` is false if it never left this process. ``avoid_addr`` is the replica's input address where it
    still looks reachable, so that the next pick must be kept off it; ``is_slow``: it was only late to answer, so it is
    still picked if no other replica can be. ``has_ended``: the replica is taken to have died, and not only to be busy.
    """

    stage_id: int
    attempt: int
    reason: str
    may_have_run: bool = True
    avoid_addr: str = ""
    is_slow: bool = False
    has_ended: bool = True


class FoundInnocent(msgspec.Struct, frozen=True):
    """The replicas that ended under the stage's work ended by another request's fault."""

    stage_id: int
    attempt: int


class TriedTogether(msgspec.Struct, frozen=True):
    """Other suspects run at the attempt's replica, too: its end would not prove which of them was the cause."""

    stage_id: int
    attempt: int


class StageUnavailable(msgspec.Struct, frozen=True):
    """No replica could be picked for the dispatch."""

    stage_id: int
    attempt: int
    reason: str


class DispatchRefused(msgspec.Struct, frozen=True):
    """The dispatch can't be written as a frame: the request is wrong, or too long with the answer so far."""

    stage_id: int
    attempt: int
    reason: str


#: The answers of a stage's replica, which the machine takes as they come off the wire.
StageMessage = (
    wire.Chunk
    | wire.Accepted
    | wire.Rejected
    | wire.HandOffPiece
    | wire.PieceTaken
    | wire.StageDone
    | wire.SegmentDone
    | wire.StageFailed
)
StageEvent = Sent | SessionBack | ReplicaLost | FoundInnocent | TriedTogether | StageUnavailable | DispatchRefused
CompanionEvent = CompanionDone | CompanionFailed
Event = Submitted | StageEvent | CompanionEvent | SegmentArrived | ClientBackpressure | DeadlinePassed | Cancelled


# ---- actions about a stage's replica


class Dispatch(msgspec.Struct, frozen=True):
    """Pick a replica of the stage, none of ``avoid`` (input addresses), and send it the work.

    A replica in ``slow`` is picked only if no other can be. ``resume`` is the part of the stage's answer that the
    client has seen: the replica continues behind it. ``is_retry``: the work may have run before, so it draws on the
    retry budget. ``segmented``: more input may come, by Update. ``blamed_for``: the work is a suspect for the end of
    these replicas, so it is tried at one where it can do little harm; see hub/pool/probation.py. ``seed`` goes with the
    parameters to a replica that is deterministic, if they have none, and after that to any (``has_had_seed``).
    ``partial_images`` is asked only of a replica that can give some: any other would refuse the parameter.
    """

    stage_id: int
    attempt: int
    inputs: Mapping[str, Any]
    params: Mapping[str, Any]
    payloads: tuple[wire.PayloadRef, ...]
    next_stages: tuple[int, ...]
    avoid: frozenset[str]
    slow: frozenset[str] = frozenset()
    resume: wire.Resume | None = None
    priority: int = 0
    is_retry: bool = False
    stream_from: tuple[int, ...] = ()
    stream_to: tuple[int, ...] = ()
    segmented: bool = False
    blamed_for: tuple[ReplicaRef, ...] = ()
    seed: int = 0
    has_had_seed: bool = False

    def params_for(self, *, deterministic: bool, partial_images: bool = False) -> dict[str, Any]:
        """The parameters for a replica: with the request's seed where that lets another repeat what this one does."""
        params = dict(self.params)
        if not partial_images:
            params.pop("partial_images", None)
        is_wanted = (deterministic and not self.segmented) or self.has_had_seed
        if is_wanted and params.get("seed") is None:
            params["seed"] = self.seed
        return params


class Update(msgspec.Struct, frozen=True):
    """Send a stage its next segment, to the replica that has the ones before; ``is_last``: no more come."""

    stage_id: int
    attempt: int
    replica: ReplicaRef | None
    segment: int
    inputs: Mapping[str, Any]
    payloads: tuple[wire.PayloadRef, ...]
    is_last: bool
    kept_from: int = 0


class FeedInput(msgspec.Struct, frozen=True):
    """Send the stage's replica a piece of a hand-off; ``payload`` None: the hand-off ended before that number."""

    stage_id: int
    attempt: int
    replica: ReplicaRef
    from_stage: int
    number: int
    payload: wire.PayloadRef | None


class PieceRoom(msgspec.Struct, frozen=True):
    """Tell the stage's replica that ``to_stage`` has taken all pieces before ``number``; see wire.PieceRoom."""

    stage_id: int
    attempt: int
    replica: ReplicaRef
    to_stage: int
    number: int
    again: bool = False


class Pause(msgspec.Struct, frozen=True):
    """Tell the stage's replica to make no more output of the request, or with ``paused`` False to go on."""

    stage_id: int
    attempt: int
    replica: ReplicaRef
    paused: bool


class Abort(msgspec.Struct, frozen=True):
    """Stop the stage's work. ``replica`` None: it was still being picked."""

    stage_id: int
    attempt: int
    replica: ReplicaRef | None


class ReleasePayload(msgspec.Struct, frozen=True):
    """Tell the replica to free the request's hand-offs: no stage will fetch them any more."""

    stage_id: int
    replica: ReplicaRef


class Acquit(msgspec.Struct, frozen=True):
    """The stage's work was a suspect, and now its output came: its replica is free for the next suspect."""

    stage_id: int


class Convict(msgspec.Struct, frozen=True):
    """The stage's work is the likely cause of the end of these replicas: others that ran there are suspects no more."""

    stage_id: int
    blamed_for: tuple[ReplicaRef, ...]


# ---- actions about the request


class StartCompanions(msgspec.Struct, frozen=True):
    """Begin the request's companions, by role, beside it."""

    prompts: Mapping[str, Mapping[str, Any]]


class StopCompanions(msgspec.Struct, frozen=True):
    """Stop the request's companions, and free their hand-offs."""


class Collected(msgspec.Struct, frozen=True):
    """Give the hand-off of a companion that is done to its parent, which ends the companion later."""

    payloads: tuple[wire.PayloadRef, ...]


class Emit(msgspec.Struct, frozen=True):
    """Hand an output to the client."""

    output: OmniOutput


class Drop(msgspec.Struct, frozen=True):
    """Count a frame that was of no use, by ``reason``."""

    reason: str


class Retry(msgspec.Struct, frozen=True):
    """Count that a stage's work is done again, or with ``resumed`` continued."""

    stage_id: int
    resumed: bool = False


class Outcome(StrEnum):
    """How a request ended."""

    OK = "ok"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Finish(msgspec.Struct, frozen=True):
    """The request is over; the last action of every machine."""

    outcome: Outcome
    error: RequestError | None = None


Action = (
    Dispatch
    | Update
    | Abort
    | Emit
    | ReleasePayload
    | FeedInput
    | PieceRoom
    | Pause
    | StartCompanions
    | StopCompanions
    | Collected
    | Acquit
    | Convict
    | Drop
    | Retry
    | Finish
)
