"""Outcomes of the engine as messages to the hub that asked."""

from __future__ import annotations

from omni_discovery import wire
from omni_discovery.errors import WireError
from omni_discovery.wire import MAX_ATTACHMENT_BYTES
from stage_runtime.jobs import Broken, Finished, Outcome, Piece
from stage_runtime.ledger import Ticket


def head_of(ticket: Ticket, outcome: Outcome, queue_length: int) -> bytes:
    """The head frame that says it. Raise WireError for what no message can hold."""
    return wire.encode(_message(ticket, outcome, queue_length))


def _message(ticket: Ticket, outcome: Outcome, queue_length: int) -> wire.FromReplica:
    match outcome:
        case Piece(_, modality, text, token_ids, mime, attachment):
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
            )
        case Finished(_, reason, payloads, usage, timings_s):
            return wire.StageDone(
                epoch=ticket.epoch,
                request_id=ticket.request_id,
                seq=ticket.next_seq,
                finish_reason=reason,
                queue_length=queue_length,
                attempt=ticket.attempt,
                payloads=payloads,
                usage=dict(usage),
                timings_s=dict(timings_s),
            )
        case Broken(_, kind, reason):
            return wire.StageFailed(
                epoch=ticket.epoch,
                request_id=ticket.request_id,
                kind=kind,
                reason=reason,
                queue_length=queue_length,
                attempt=ticket.attempt,
            )
