"""The accepted requests of one replica, and the attempts that may not begin any more."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Final

from msgspec import UNSET

from omni_discovery import wire
from omni_discovery.wire.session import Peer
from stage_runtime.engine_loop.jobs import Work, owner_of
from stage_runtime.server.held_output import HeldOutput

#: How many ended requests are remembered, so that a Submit that comes twice does not run twice.
_MAX_ENDED: Final = 32_768
#: For the inputs of all requests of one hub that are in flight, in bytes.
MOST_BYTES_OF_HUB: Final = 512 << 20


@dataclass(slots=True, eq=False)
class Ticket:
    """One accepted request. ``epoch`` is the one it was submitted under; all its answers carry it."""

    key: str
    peer: Peer
    request_id: str
    attempt: int
    epoch: int
    #: The client's name for the request; empty if the hub sent none.
    label: str = ""
    #: The id of the request's trace; empty if it has none.
    trace: str = ""
    #: The number of the request's next frame.
    next_seq: int = 0
    #: How many pieces of the request's hand-off were reported.
    pieces: int = 0
    #: For a request that comes in segments: the last segment that came, and whether that has ended.
    segment: int | None = None
    is_idle: bool = False
    #: The stages of which more pieces will come, and whether the hub's client is behind.
    open_streams: set[int] = field(default_factory=set)
    is_paused: bool = False
    #: Whether the hub has spent a credit for it, be it one that was void when the request came.
    is_covered: bool = False
    #: For how long it has not used its slot, in seconds, while other hubs waited and its own had more than its share;
    #: less what it has used it since.
    kept_s: float = 0.0
    #: What of that was counted since something happened for it last, and when that was, monotonic seconds.
    quiet_s: float = 0.0
    active_at_s: float = 0.0
    #: Output that is held while the hub has not read what was sent before it.
    held: HeldOutput = field(default_factory=HeldOutput)
    #: Whether the engine has parked the request: its slot is then free for others.
    is_parked: bool = False
    #: From when on an Abort counts as the end of the request's time, monotonic seconds.
    overdue_at_s: float = float("inf")
    #: Whether the hub stopped the request because its time was over.
    is_overdue: bool = False
    #: About how much memory its inputs take, in bytes; 0 if little.
    size_bytes: int = 0
    #: The connection that the last Abort came on, its epoch and its attempt: it is answered when the request has ended.
    abort: tuple[Peer, int, int] | None = None

    @property
    def owner(self) -> str:
        """The name of the hub's request over all its attempts."""
        return owner_of(self.peer.hub_id, self.request_id)


class Ledger:
    """Requests in flight and requests that ended, owned by the ZMQ thread. One attempt of a request counts at once."""

    def __init__(self, max_ended: int = _MAX_ENDED) -> None:
        self._max_ended = max_ended
        #: Requests in flight, by key.
        self.tickets: dict[str, Ticket] = {}
        #: Those of them that the engine has parked, the one that was parked first before all others.
        self._parked: dict[str, Ticket] = {}
        #: About how much memory the inputs of each hub's requests in flight take, in bytes, by hub id.
        self._bytes_of_hub: Counter[str] = Counter()
        #: Part of every key, so that keys differ also where a hub uses a request id again.
        self._serial = 0
        #: The attempt in flight that counts, by hub id and request id.
        self._current: dict[tuple[str, str], Ticket] = {}
        #: The last attempt that ended or must not begin, by connection and request, oldest first. Another process of
        #: the same hub may use the same request ids, on connections of its own. Not a plain dict: that would look for
        #: its oldest entry through the holes that all older ones left.
        self._ended: OrderedDict[tuple[str, str], int] = OrderedDict()

    def __repr__(self) -> str:
        return f"Ledger(in_flight={len(self.tickets)}, ended={len(self._ended)}, accepted={self._serial})"

    def __len__(self) -> int:
        return len(self.tickets)

    @property
    def parked_count(self) -> int:
        """How many requests in flight the engine has parked."""
        return len(self._parked)

    @property
    def longest_parked(self) -> Ticket | None:
        """The request that has been parked for longest; None if none is."""
        return next(iter(self._parked.values()), None)

    def park(self, ticket: Ticket, *, is_parked: bool) -> None:
        """Record that the engine has parked a request in flight, or goes on with it."""
        ticket.is_parked = is_parked
        if is_parked:
            self._parked[ticket.key] = ticket
        else:
            self._parked.pop(ticket.key, None)

    def open_ticket(self, peer: Peer, request_id: str, attempt: int, epoch: int) -> Ticket:
        """Record an accepted request."""
        self._serial += 1
        ticket = Ticket(f"{peer.hub_id}/{request_id}/{attempt}#{self._serial}", peer, request_id, attempt, epoch)
        self.tickets[ticket.key] = ticket
        self._current[peer.hub_id, request_id] = ticket
        return ticket

    def has_room(self, hub_id: str, more_bytes: int) -> bool:
        """Whether a hub's requests in flight may take so much more memory. The first of them always may."""
        taken_bytes = self._bytes_of_hub.get(hub_id, 0)
        return not taken_bytes or taken_bytes + more_bytes <= MOST_BYTES_OF_HUB

    def resize_ticket(self, ticket: Ticket, size_bytes: int) -> None:
        """Record how much memory the inputs of a request in flight take."""
        hub_id = ticket.peer.hub_id
        self._bytes_of_hub[hub_id] += size_bytes - ticket.size_bytes
        if not self._bytes_of_hub[hub_id]:
            del self._bytes_of_hub[hub_id]
        ticket.size_bytes = size_bytes

    def current_ticket(self, hub_id: str, request_id: str) -> Ticket | None:
        """The attempt of a hub's request that is in flight; None if there is none."""
        return self._current.get((hub_id, request_id))

    def has_seen_attempt(self, peer: Peer, request_id: str, attempt: int) -> bool:
        """Whether that attempt, or a later one, is in flight, has ended or was aborted before it came."""
        running = self._current.get((peer.hub_id, request_id))
        if running is not None and attempt <= running.attempt:
            return True
        return attempt <= self._ended.get((peer.name, request_id), -1)

    def close_ticket(self, ticket: Ticket) -> bool:
        """Record that a request ended. Return False if it had ended already."""
        if self.tickets.pop(ticket.key, None) is None:
            return False
        self._parked.pop(ticket.key, None)
        if ticket.size_bytes:
            self.resize_ticket(ticket, 0)
        request = ticket.peer.hub_id, ticket.request_id
        if self._current.get(request) is ticket:
            del self._current[request]
        self.bar_attempts(ticket.peer, ticket.request_id, ticket.attempt)
        return True

    def bar_attempts(self, peer: Peer, request_id: str, attempt: int) -> None:
        """Let no attempt up to this one begin any more."""
        request = peer.name, request_id
        self._ended[request] = max(attempt, self._ended.pop(request, -1))
        if len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)

    def tickets_of_peer(self, name: str) -> list[Ticket]:
        """The requests in flight whose answers go to one connection."""
        return [ticket for ticket in self.tickets.values() if ticket.peer.name == name]


def work_of(ticket: Ticket, submit: wire.Submit, now_s: float) -> Work:
    """The engine's job for an accepted request; its deadline is counted from ``now_s``, on the monotonic clock."""
    return Work(
        key=ticket.key,
        owner=ticket.owner,
        request_id=ticket.request_id,
        attempt=ticket.attempt,
        inputs=submit.inputs,
        params=submit.params,
        payloads=submit.payloads,
        # Each gets the hand-off once.
        next_stages=tuple(dict.fromkeys(submit.next_stages)),
        accepted_at_s=now_s,
        deadline_s=now_s + submit.remaining_s,
        resume=submit.resume,
        priority=submit.priority,
        segment=0 if submit.segmented else None,
        stream_from=submit.stream_from,
        stream_to=tuple(dict.fromkeys(submit.stream_to)),
        trace=submit.trace,
        client="" if submit.client is UNSET else submit.client,
    )
