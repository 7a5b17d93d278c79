"""Outcomes of the engine as messages to the hub that asked."""

from __future__ import annotations

from msgspec import UNSET

from omni_discovery import wire
from omni_discovery.errors import WireError
from omni_discovery.wire import MAX_ATTACHMENT_BYTES
from stage_runtime.jobs import Broken, Finished, HandedPiece, Piece, SegmentEnded, Spoken, TookPiece
from stage_runtime.ledger import Ticket
from stage_runtime.lifecycle import Refusal


def head_of(ticket: Ticket, outcome: Spoken, queue_length: int) -> bytes:
    """The head frame that says it. Raise WireError for what no message can hold."""
    return wire.encode(_message(ticket, outcome, queue_length))


def rejection_of(submit: wire.Submit, refusal: Refusal, queue_length: int) -> wire.Rejected:
    """That a request is not taken, and why."""
    return wire.Rejected(
        epoch=submit.epoch,
        request_id=submit.request_id,
        attempt=submit.attempt,
        kind=refusal.kind,
        reason=wire.shortened(refusal.reason),
        queue_length=queue_length,
    )


def _message(ticket: Ticket, outcome: Spoken, queue_length: int) -> wire.FromReplica:
    # Patterns that bind fields by position would double what each token costs here.
    match outcome:
        case Piece():
            size_bytes = len(outcome.attachment or b"")
            if size_bytes > MAX_ATTACHMENT_BYTES:
                raise WireError(f"an attachment of {size_bytes} bytes, where a message may have {MAX_ATTACHMENT_BYTES}")
            return wire.Chunk(
                epoch=ticket.epoch,
                request_id=ticket.request_id,
                seq=ticket.next_seq,
                modality=outcome.modality,
                queue_length=queue_length,
                attempt=ticket.attempt,
                text=outcome.text,
                token_ids=outcome.token_ids,
                mime=outcome.mime,
                logprobs=outcome.logprobs or UNSET,
                prompt_logprobs=outcome.prompt_logprobs or UNSET,
                prompt_token_ids=outcome.prompt_token_ids or UNSET,
            )
        case HandedPiece():
            return wire.HandOffPiece(
                epoch=ticket.epoch,
                request_id=ticket.request_id,
                attempt=ticket.attempt,
                number=outcome.number,
                payloads=outcome.payloads,
                queue_length=queue_length,
            )
        case TookPiece():
            return wire.PieceTaken(
                epoch=ticket.epoch,
                request_id=ticket.request_id,
                attempt=ticket.attempt,
                from_stage=outcome.from_stage,
                number=outcome.number,
                queue_length=queue_length,
            )
        case Finished():
            return wire.StageDone(
                epoch=ticket.epoch,
                request_id=ticket.request_id,
                seq=ticket.next_seq,
                finish_reason=wire.shortened(outcome.finish_reason, 256),
                queue_length=queue_length,
                attempt=ticket.attempt,
                payloads=outcome.payloads,
                usage=dict(outcome.usage),
                timings_s=dict(outcome.timings_s),
                pieces=ticket.pieces,
                stop_reason=UNSET if outcome.stop_reason is None else outcome.stop_reason,
            )
        case SegmentEnded():
            return wire.SegmentDone(
                epoch=ticket.epoch,
                request_id=ticket.request_id,
                attempt=ticket.attempt,
                seq=ticket.next_seq,
                segment=ticket.segment or 0,
                finish_reason=wire.shortened(outcome.finish_reason, 256),
                queue_length=queue_length,
                payloads=outcome.payloads,
                usage=dict(outcome.usage),
            )
        case Broken():
            return wire.StageFailed(
                epoch=ticket.epoch,
                request_id=ticket.request_id,
                kind=outcome.kind,
                reason=wire.shortened(outcome.reason),
                queue_length=queue_length,
                attempt=ticket.attempt,
            )
