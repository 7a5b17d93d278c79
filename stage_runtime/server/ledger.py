"""Who is owed an answer: the accepted requests of one replica, and what is remembered of those that ended."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from omni_discovery import wire
from omni_discovery.wire.session import Peer
from stage_runtime.engine_loop.jobs import Work, owner_of

#: How many ended requests are remembered, so that none of them runs again when its frame comes twice.
_MAX_ENDED: Final = 32_768


@dataclass(slots=True, eq=False)
class Ticket:
    """One accepted request. ``epoch`` is the life it was submitted to; all its answers carry it."""

    key: str
    peer: Peer
    request_id: str
    attempt: int
    epoch: int
    #: The number of its next frame.
    next_seq: int = 0
    #: How many pieces of its hand-off were said.
    pieces: int = 0
    #: Of a request that comes in segments, the last one that came, and whether that has ended.
    segment: int | None = None
    is_idle: bool = False
    #: Whether the engine has put it aside: then others have its slot.
    is_parked: bool = False

    @property
    def owner(self) -> str:
        """The hub's request over all its attempts."""
        return owner_of(self.peer.hub_id, self.request_id)


class Ledger:
    """Owned by the ZMQ thread. A hub's request has at most one attempt in it that still counts."""

    def __init__(self, max_ended: int = _MAX_ENDED) -> None:
        self._max_ended = max_ended
        #: By key.
        self.tickets: dict[str, Ticket] = {}
        #: Makes every key new, also where a hub uses a request id again.
        self._serial = 0
        #: The attempt that counts, by hub and request.
        self._current: dict[tuple[str, str], Ticket] = {}
        #: The last attempt that ended or must not begin, by connection and request, oldest first. Another process of
        #: the same hub may use its request ids again, and has connections of its own. A plain dict would look for its
        #: oldest through the holes that all the older ones left.
        self._ended: OrderedDict[tuple[str, str], int] = OrderedDict()

    def __len__(self) -> int:
        return len(self.tickets)

    def open(self, peer: Peer, request_id: str, attempt: int, epoch: int) -> Ticket:
        """Write down an accepted request."""
        self._serial += 1
        ticket = Ticket(f"{peer.hub_id}/{request_id}/{attempt}#{self._serial}", peer, request_id, attempt, epoch)
        self.tickets[ticket.key] = ticket
        self._current[peer.hub_id, request_id] = ticket
        return ticket

    def current(self, hub_id: str, request_id: str) -> Ticket | None:
        """The attempt of a hub's request that is in flight here."""
        return self._current.get((hub_id, request_id))

    def was_here(self, peer: Peer, request_id: str, attempt: int) -> bool:
        """Whether that attempt, or a later one, runs, has ended or was aborted before it came."""
        running = self._current.get((peer.hub_id, request_id))
        if running is not None and attempt <= running.attempt:
            return True
        return attempt <= self._ended.get((peer.name, request_id), -1)

    def close(self, ticket: Ticket) -> bool:
        """The request ended; False if it had already."""
        if self.tickets.pop(ticket.key, None) is None:
            return False
        request = ticket.peer.hub_id, ticket.request_id
        if self._current.get(request) is ticket:
            del self._current[request]
        self.bar(ticket.peer, ticket.request_id, ticket.attempt)
        return True

    def bar(self, peer: Peer, request_id: str, attempt: int) -> None:
        """No attempt up to that one may begin any more."""
        request = peer.name, request_id
        self._ended[request] = max(attempt, self._ended.pop(request, -1))
        if len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)

    def of_peer(self, name: str) -> list[Ticket]:
        """All whose answers go to one connection."""
        return [ticket for ticket in self.tickets.values() if ticket.peer.name == name]


def work_of(ticket: Ticket, submit: wire.Submit, now_s: float) -> Work:
    """What the engine is to do for an accepted request."""
    return Work(
        key=ticket.key,
        owner=ticket.owner,
        request_id=ticket.request_id,
        attempt=ticket.attempt,
        inputs=submit.inputs,
        params=submit.params,
        payloads=submit.payloads,
        next_stages=submit.next_stages,
        accepted_at_s=now_s,
        deadline_s=now_s + submit.remaining_s,
        resume=submit.resume,
        priority=submit.priority,
        segment=0 if submit.segmented else None,
        stream_from=submit.stream_from,
        stream_to=submit.stream_to,
        trace=submit.trace,
    )
