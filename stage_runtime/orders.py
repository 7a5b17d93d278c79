"""What a hub says about a request that is here, as jobs for the engine's thread."""

from __future__ import annotations

from collections.abc import Sequence

from omni_discovery import wire
from stage_runtime import segments
from stage_runtime.jobs import Fed, Job, Pause, Release, Room
from stage_runtime.ledger import Ledger, owner_of
from stage_runtime.peers import Peer

Order = wire.ReleasePayloads | wire.Feed | wire.PieceRoom | wire.Pause | wire.Update


def jobs_of(ledger: Ledger, peer: Peer, order: Order) -> tuple[wire.Accepted | wire.Rejected | None, Sequence[Job]]:
    """The answer, where one is due, and what is to be done. What is about requests that are not here is let go."""
    if isinstance(order, wire.ReleasePayloads):
        return None, [Release(owner_of(peer.hub_id, order.request_id))]
    if isinstance(order, wire.Update):
        return segments.take(ledger, peer, order)
    ticket = ledger.current(peer.hub_id, order.request_id)
    if ticket is None or ticket.attempt != order.attempt:
        return None, []
    if isinstance(order, wire.Pause):
        accepted = wire.Accepted(
            epoch=order.epoch, request_id=order.request_id, attempt=order.attempt, queue_length=len(ledger)
        )
        return accepted, [Pause(ticket.key, order.paused)]
    if isinstance(order, wire.Feed):
        return None, [Fed(ticket.key, order.from_stage, order.number, order.payload, order.is_last)]
    return None, [Room(ticket.key, order.to_stage, order.number, order.again)]
