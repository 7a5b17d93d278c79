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
    match outcome:
        case Piece(_, modality, text, token_ids, mime, attachment, logprobs, prompt_logprobs, prompt_token_ids):
            if attachment is not None and len(attachment) > MAX_ATTACHMENT_BYTES:
                raise WireError(
                    f"an attachment of {len(attachment)} bytes, where a message may have {MAX_ATTACHMENT_BYTES}"
                )
            return wire.Chunk(
                epoch=ticket.epoch,
                request_id=ticket.request_id,
                seq=ticket.next_seq,
                modality=modality,
                queue_length=queue_length,
                attempt=ticket.attempt,
                text=text,
                token_ids=token_ids,
                mime=mime,
                logprobs=logprobs or UNSET,
                prompt_logprobs=prompt_logprobs or UNSET,
                prompt_token_ids=prompt_token_ids or UNSET,
            )
        case HandedPiece(_, number, payloads):
            return wire.HandOffPiece(
                epoch=ticket.epoch,
                request_id=ticket.request_id,
                attempt=ticket.attempt,
                number=number,
                payloads=payloads,
                queue_length=queue_length,
            )
        case TookPiece(_, from_stage, number):
            return wire.PieceTaken(
                epoch=ticket.epoch,
                request_id=ticket.request_id,
                attempt=ticket.attempt,
                from_stage=from_stage,
                number=number,
                queue_length=queue_length,
            )
        case Finished(_, reason, payloads, usage, timings_s, stop_reason):
            return wire.StageDone(
                epoch=ticket.epoch,
                request_id=ticket.request_id,
                seq=ticket.next_seq,
                finish_reason=wire.shortened(reason, 256),
                queue_length=queue_length,
                attempt=ticket.attempt,
                payloads=payloads,
                usage=dict(usage),
                timings_s=dict(timings_s),
                pieces=ticket.pieces,
                stop_reason=UNSET if stop_reason is None else stop_reason,
            )
        case SegmentEnded(_, reason, payloads, usage):
            return wire.SegmentDone(
                epoch=ticket.epoch,
                request_id=ticket.request_id,
                attempt=ticket.attempt,
                seq=ticket.next_seq,
                segment=ticket.segment or 0,
                finish_reason=wire.shortened(reason, 256),
                queue_length=queue_length,
                payloads=payloads,
                usage=dict(usage),
            )
        case Broken(_, kind, reason):
            return wire.StageFailed(
                epoch=ticket.epoch,
                request_id=ticket.request_id,
                kind=kind,
                reason=wire.shortened(reason),
                queue_length=queue_length,
                attempt=ticket.attempt,
            )
