"""Who is owed an answer: the accepted requests of one replica, and the number of each one's next frame."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ticket:
    """One accepted request. ``epoch`` is the life it was submitted to; all its answers carry it."""

    key: str
    hub_id: str
    request_id: str
    attempt: int
    epoch: int


class Ledger:
    """Owned by the ZMQ thread. A hub's request has at most one attempt in it that still counts."""

    def __init__(self) -> None:
        self._tickets: dict[str, Ticket] = {}
        #: Makes every key new, also where a hub uses a request id again.
        self._serial = 0
        self._next_seq: dict[str, int] = {}
        #: The attempt that counts, by hub and request.
        self._current: dict[tuple[str, str], str] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def open(self, hub_id: str, request_id: str, attempt: int, epoch: int) -> Ticket:
        """Write down an accepted request."""
        self._serial += 1
        ticket = Ticket(f"{hub_id}/{request_id}/{attempt}#{self._serial}", hub_id, request_id, attempt, epoch)
        self._tickets[ticket.key] = ticket
        self._next_seq[ticket.key] = 0
        self._current[hub_id, request_id] = ticket.key
        return ticket

    def current(self, hub_id: str, request_id: str) -> Ticket | None:
        """The attempt of a hub's request that is in flight here."""
        key = self._current.get((hub_id, request_id))
        return None if key is None else self._tickets[key]

    def get(self, key: str) -> Ticket | None:
        """The request with that key, if it is in flight."""
        return self._tickets.get(key)

    def take_seq(self, key: str) -> int:
        """The number of the request's next frame; each is given out once."""
        seq = self._next_seq[key]
        self._next_seq[key] = seq + 1
        return seq

    def close(self, key: str) -> None:
        """The request ended. Unknown keys are fine."""
        ticket = self._tickets.pop(key, None)
        if ticket is None:
            return
        del self._next_seq[key]
        if self._current.get((ticket.hub_id, ticket.request_id)) == key:
            del self._current[ticket.hub_id, ticket.request_id]

    def of_hub(self, hub_id: str) -> list[Ticket]:
        """All that one hub waits for."""
        return [ticket for ticket in self._tickets.values() if ticket.hub_id == hub_id]

    def hubs(self) -> set[str]:
        """The hubs that wait for something."""
        return {ticket.hub_id for ticket in self._tickets.values()}
