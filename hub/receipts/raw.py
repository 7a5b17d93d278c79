"""The receipt of one request as it is kept: encoded once when the request ends, decoded when somebody asks. Pure.

Encoding is all that every request pays for, so what is kept are plain tuples in the order in which they came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import msgspec

from hub.pool.snapshots import PoolSnapshot, ReplicaRow, picking_of
from omni_discovery.receipts.receipt import Delay, Happening, Receipt, ReceiptLine, StageAttempt, Transfer

if TYPE_CHECKING:
    from hub.request.machine import RequestMachine
    from hub.request.plan import RequestPlan

#: How much of a reason is kept, in characters.
_MOST_REASON: Final = 300

#: What a request waited for before it could be picked a replica for, or sent again.
SLOT: Final = "slot"
RETRY_BUDGET: Final = "retry budget"
TRIAL: Final = "trial"

#: How many marks one request may keep before its waits are no longer among them.
MOST_MARKS: Final = 100
#: Bits of a mark: the attempt is a retry; it continues, or repeats, what the client had seen.
IS_RETRY: Final = 1
CONTINUES: Final = 2
REPEATS: Final = 4


class DispatchMark(NamedTuple):
    """What the dispatcher did for one attempt: sent it (``what`` empty), or had it wait for ``what``.

    ``at_s`` and ``due_s`` are on ``time.perf_counter``.
    """

    what: str
    at_s: float
    stage_id: int
    attempt: int
    due_s: float
    view_revision: int = 0
    bits: int = 0
    host: str = ""
    version: str = ""
    snapshot: PoolSnapshot | None = None


class AskedRequest(Protocol):
    """What a receipt needs of a request; ``AddRequest`` has this form."""

    @property
    def request_id(self) -> str:
        """Its id inside the hub."""

    @property
    def shown_id(self) -> str:
        """The client's name for it."""

    @property
    def label(self) -> str:
        """A label of the client's."""

    @property
    def key(self) -> str:
        """The name of the API key."""

    @property
    def parent_id(self) -> str:
        """The request that it is a companion of."""

    @property
    def role(self) -> str:
        """Its role there."""

    @property
    def priority(self) -> int:
        """Its priority."""

    @property
    def received_s(self) -> float:
        """When the hub received it, on ``time.perf_counter``."""

    @property
    def plan(self) -> RequestPlan:
        """Its stages."""


class Ending(NamedTuple):
    """How a request ended: ``error`` is a type's name, ``stage_id`` the stage that it is about, if any."""

    outcome: str = ""
    error: str = ""
    stage_id: int | None = None


#: The ending of a request that has none yet.
UNDER_WAY: Final = Ending()


class _Stored(msgspec.Struct, array_like=True, frozen=True, kw_only=True, gc=False):
    """The kept form. Only this process reads it: it may change from one release to the next."""

    request_id: str
    shown_id: str
    label: str
    key: str
    parent_id: str
    role: str
    priority: int
    received_at: float
    took_s: float
    ending: tuple[str, str, int | None]
    stages: tuple[int, ...]
    final_stages: tuple[int, ...]
    fingerprints: dict[int, str]
    timings_s: dict[str, float]
    #: When, on ``time.perf_counter``, type, stage, attempt, detail.
    events: list[tuple[float, str, int | None, int | None, str | None]]
    marks: list[tuple[str, float, int, int, float, int, int, str, str, PoolSnapshot | None]]
    #: From stage, to stage, connector, pieces, bytes.
    transfers: list[tuple[int, int, str, int, int]]
    began_s: float


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Stored).decode


def encode_receipt(
    request: AskedRequest,
    machine: RequestMachine,
    marks: Sequence[DispatchMark],
    fingerprints: Mapping[int, str],
    ending: Ending,
    now_s: float,
    wall_s: float,
) -> bytes:
    """Encode what is known of a request, which has ended or is under way (an empty ``ending``).

    ``now_s`` is on ``time.perf_counter``, ``wall_s`` the same moment by the wall clock.
    """
    began_s, plan = request.received_s, request.plan
    took_s = now_s - began_s
    # Of details only texts: where work was sent to is in the marks.
    events = [
        (at_s, kind.__name__, stage_id, attempt, detail if detail.__class__ is str else None)
        for at_s, kind, stage_id, attempt, detail, _ in machine.story.entries
    ]
    return _encode(
        (
            request.request_id,
            request.shown_id,
            request.label,
            request.key,
            request.parent_id,
            request.role,
            request.priority,
            wall_s - took_s,
            took_s,
            ending,
            plan.stages,
            [*plan.finals],
            fingerprints,
            machine.state.public.pipeline_timings,
            events,
            marks,
            _transfers(machine),
            began_s,
        )
    )


def _transfers(machine: RequestMachine) -> list[tuple[int, int, str, int, int]]:
    found = []
    for stage_id, run in machine.runs.items():
        if run.handed or run.streams:
            pieces = [(from_stage, relay.refs) for from_stage, relay in run.streams.items()]
            for from_stage, refs in [*run.handed.items(), *pieces]:
                if refs:
                    size_bytes = sum(ref.size_bytes for ref in refs)
                    found.append((from_stage, stage_id, refs[0].connector, len(refs), size_bytes))
    return found


def line_of(encoded: bytes, hub: str) -> ReceiptLine:
    """One line about a request."""
    raw = _decode(encoded)
    sent = [mark for mark in map(DispatchMark._make, raw.marks) if not mark.what and mark.snapshot is not None]
    done_s = {(stage_id, attempt): at_s for at_s, what, stage_id, attempt, _ in raw.events if what == "StageDone"}
    ends_s = [done_s.get((mark.stage_id, mark.attempt)) for mark in sent]
    return ReceiptLine(
        request_id=raw.request_id,
        shown_id=raw.shown_id,
        label=raw.label,
        hub=hub,
        received_at=raw.received_at,
        took_s=raw.took_s if raw.ending[0] else None,
        outcome=raw.ending[0],
        error=raw.ending[1],
        error_stage=raw.ending[2],
        reason=_last_reason(raw),
        replicas=[f"{mark.stage_id}/{mark.snapshot[1]}" for mark in sent if mark.snapshot is not None],
        spans_s=[None if end_s is None else end_s - mark.at_s for mark, end_s in zip(sent, ends_s, strict=True)],
    )


def _last_reason(raw: _Stored) -> str:
    failures = (detail for _, what, _, _, detail in reversed(raw.events) if what in _ENDS and what != "StageDone")
    return _text(next(failures, None))


def picks_of(encoded: bytes) -> list[tuple[int, float, int, tuple[ReplicaRow, ...]]]:
    """The picks of a request: stage, wall-clock moment, chosen replica id, and all replicas as they were."""
    raw = _decode(encoded)
    marks = map(DispatchMark._make, raw.marks)
    return [
        (mark.stage_id, raw.received_at + mark.at_s - raw.began_s, mark.snapshot[1], mark.snapshot[5])
        for mark in marks
        if not mark.what and mark.snapshot is not None
    ]


def receipt_of(encoded: bytes, hub: str, policy: str) -> Receipt:
    """The shown form; hosts and versions of replicas that were not chosen are not in it."""
    raw = _decode(encoded)
    ended_s = raw.took_s if raw.ending[0] else None
    marks = [DispatchMark._make(mark) for mark in raw.marks]
    finals = dict.fromkeys(raw.final_stages)
    return Receipt(
        request_id=raw.request_id,
        shown_id=raw.shown_id,
        label=raw.label,
        key=raw.key,
        hub=hub,
        parent_id=raw.parent_id,
        role=raw.role,
        received_at=raw.received_at,
        took_s=ended_s,
        outcome=raw.ending[0],
        error=raw.ending[1],
        error_stage=raw.ending[2],
        stages=list(raw.stages),
        final_stages=list(finals),
        priority=raw.priority,
        fingerprints=[raw.fingerprints.get(stage_id, "") for stage_id in raw.stages],
        attempts=_attempts(raw, marks, policy, ended_s),
        transfers=[
            Transfer(
                from_stage=from_stage,
                to_stage=to_stage,
                connector=connector,
                pieces=pieces,
                size_bytes=size_bytes,
                seconds=raw.timings_s.get(f"stage{to_stage}.transfer"),
            )
            for from_stage, to_stage, connector, pieces, size_bytes in raw.transfers
        ],
        events=[
            Happening(at_s=at_s - raw.began_s, what=what, stage=stage_id, attempt=attempt, detail=_text(detail))
            for at_s, what, stage_id, attempt, detail in raw.events
        ],
        timings_s=raw.timings_s,
    )


def _text(detail: str | None) -> str:
    return (detail or "")[:_MOST_REASON]


#: How an attempt ends, by the event that ends it.
_ENDS: Final[Mapping[str, str]] = {
    "StageDone": "done",
    "StageFailed": "failed",
    "Rejected": "rejected",
    "ReplicaLost": "lost",
    "StageUnavailable": "unavailable",
    "DispatchRefused": "unsendable",
}


def _attempts(raw: _Stored, marks: Sequence[DispatchMark], policy: str, ended_s: float | None) -> list[StageAttempt]:
    """Each attempt in the order in which they began, from the dispatcher's marks and the machine's events."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for mark in marks:
        fields = found.setdefault((mark.stage_id, mark.attempt), {"waits": []})
        fields.setdefault("due_s", mark.due_s - raw.began_s)
        if mark.what:
            fields["waits"].append((mark.at_s - raw.began_s, _why_waits(mark)))
            continue
        fields |= {"view_revision": mark.view_revision, "is_retry": bool(mark.bits & IS_RETRY)}
        fields |= {"continues": bool(mark.bits & CONTINUES), "repeats": bool(mark.bits & REPEATS)}
        fields["picked_s"] = mark.at_s - raw.began_s
        if mark.snapshot is not None:
            picking = picking_of(mark.snapshot, mark.stage_id, policy)
            chosen = (picking.chosen, picking.chosen_epoch)
            picking = msgspec.structs.replace(
                picking,
                candidates=[
                    msgspec.structs.replace(each, host=mark.host, version=mark.version)
                    if (each.replica, each.epoch) == chosen
                    else each
                    for each in picking.candidates
                ],
            )
            fields |= {"picking": picking, "replica": picking.chosen, "epoch": picking.chosen_epoch}
    for at_s, what, stage_id, attempt, detail in raw.events:
        if stage_id is None or attempt is None:
            continue
        fields = found.setdefault((stage_id, attempt), {"waits": []})
        if "ended_s" not in fields:
            _add_event(fields, at_s - raw.began_s, what, _text(detail))
    return [_attempt(key, fields, ended_s) for key, fields in found.items()]


def _add_event(fields: dict[str, Any], at_s: float, what: str, detail: str) -> None:
    match what:
        case "Sent":
            fields["sent_s"] = at_s
        case "Accepted":
            fields.setdefault("accepted_s", at_s)
        case "Chunk":
            if "first_output_s" not in fields:
                fields |= {"first_output_s": at_s, "modality": detail}
        case "HandOffPiece":
            fields.setdefault("first_piece_s", at_s)
        case _ if what in _ENDS:
            reason = "" if what == "StageDone" else detail
            fields |= {"ended_s": at_s, "outcome": _ENDS[what], "reason": reason}


def _attempt(key: tuple[int, int], fields: dict[str, Any], ended_s: float | None) -> StageAttempt:
    waits, picked_s = fields.pop("waits"), fields.pop("picked_s", None)
    if "ended_s" not in fields and ended_s is not None:
        fields |= {"ended_s": ended_s, "outcome": "aborted"}
    until_s = picked_s if picked_s is not None else fields.get("ended_s")
    ends = [*(since_s for since_s, _ in waits[1:]), until_s]
    delays = [Delay(what=what, from_s=since_s, to_s=to_s) for (since_s, what), to_s in zip(waits, ends, strict=False)]
    return StageAttempt(stage=key[0], attempt=key[1], waits=delays, **fields)


def _why_waits(mark: DispatchMark) -> str:
    """What a mark's work waits for, in words."""
    match mark.what:
        case str(what) if what == RETRY_BUDGET:
            return "the retry budget: retries are a fifth of all requests at most"
        case str(what) if what == TRIAL:
            return "a trial: two replicas ended with it, and it is tried alone first"
    return why_waits(mark.snapshot)


def why_waits(snapshot: PoolSnapshot | None) -> str:
    """What a pick waits for that found this snapshot, in words."""
    if snapshot is None:
        return "a free slot"
    known, free, rows = snapshot[3:6]
    if not known:
        return "a replica: none is registered"
    if free:
        return "a credit of a better replica than those that are free"
    counts: dict[str, int] = {}
    for row in rows:
        counts[row[10] or "free"] = counts.get(row[10] or "free", 0) + 1
    reasons = sorted(counts.items(), key=lambda item: -item[1])
    return f"a free slot: of {known} replicas " + ", ".join(f"{count} {why}" for why, count in reasons)
