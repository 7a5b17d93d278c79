"""Messages of a hub about a request that is here already, as jobs for the engine's thread. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omni_discovery import wire
from omni_discovery.wire import FailureKind
from omni_discovery.wire.session import Peer
from stage_runtime.engine_loop.jobs import Job, NextSegment, Pause, PieceArrived, ReleasePayload, WindowUpdate, owner_of
from stage_runtime.server.ledger import Ledger, Ticket


def refusal_of(ticket: Ticket | None, peer: Peer, update: wire.Update) -> str:
    """Why the next segment of a request can't be taken; empty if it can. ``ticket`` is None for unknown requests."""
    if ticket is None or ticket.attempt != update.attempt or ticket.peer.name != peer.name:
        return "there is no such request here: it has ended, or never was"
    if ticket.segment is None:
        return "the request was not begun as one that comes in segments"
    if update.segment > ticket.segment + 1:
        return f"segment {update.segment} came behind segment {ticket.segment}"
    if update.segment > ticket.segment and not ticket.is_idle:
        return f"segment {ticket.segment} has not ended yet"
    return ""


def accept_update(
    ledger: Ledger, peer: Peer, update: wire.Update
) -> tuple[wire.Accepted | wire.Rejected, list[NextSegment]]:
    """The answer to a request's next segment, and its job. One that came before is accepted again, without a job."""
    ticket = ledger.current_ticket(peer.hub_id, update.request_id)
    reason = refusal_of(ticket, peer, update)
    named: dict[str, Any] = {
        "epoch": update.epoch,
        "request_id": update.request_id,
        "attempt": update.attempt,
        "queue_length": len(ledger),
    }
    if reason or ticket is None or ticket.segment is None:
        return wire.Rejected(**named, kind=FailureKind.INVALID, reason=reason), []
    if update.segment <= ticket.segment:
        return wire.Accepted(**named), []
    ticket.segment, ticket.is_idle = update.segment, False
    return wire.Accepted(**named), [
        NextSegment(
            ticket.key,
            update.segment,
            update.inputs,
            update.payloads,
            is_last=update.is_last,
            kept_from=update.kept_from,
        )
    ]


Order = wire.ReleasePayloads | wire.Feed | wire.PieceRoom | wire.Pause | wire.Update


def jobs_of(ledger: Ledger, peer: Peer, order: Order) -> tuple[wire.Accepted | wire.Rejected | None, Sequence[Job]]:
    """The answer to an order, where it has one, and its jobs. Orders about requests that are not here do nothing."""
    if isinstance(order, wire.ReleasePayloads):
        return None, [ReleasePayload(owner_of(peer.hub_id, order.request_id))]
    if isinstance(order, wire.Update):
        return accept_update(ledger, peer, order)
    ticket = ledger.current_ticket(peer.hub_id, order.request_id)
    if ticket is None or ticket.attempt != order.attempt:
        return None, []
    if isinstance(order, wire.Pause):
        accepted = wire.Accepted(
            epoch=order.epoch, request_id=order.request_id, attempt=order.attempt, queue_length=len(ledger)
        )
        ticket.is_paused = order.paused
        return accepted, [Pause(ticket.key, order.paused)]
    if isinstance(order, wire.Feed):
        if order.is_last:
            ticket.open_streams.discard(order.from_stage)
        return None, [PieceArrived(ticket.key, order.from_stage, order.number, order.payload, order.is_last)]
    return None, [WindowUpdate(ticket.key, order.to_stage, order.number, order.again)]
