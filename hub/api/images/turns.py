"""In which order the events of several requests for pictures are sent, where unfinished pictures are among them. Pure.

An event of an unfinished picture does not say which picture it is of. So those of one request are sent after those of
the other: whatever comes before an event of a finished picture is of that picture.
"""

from __future__ import annotations


class PictureTurns:
    """The turns of requests 0, 1, ... Finished pictures wait for their turn; unfinished ones of others are left out.

    With ``are_kept`` False all is sent as it comes, and no unfinished picture is.
    """

    def __init__(self, *, are_kept: bool) -> None:
        self._are_kept = are_kept
        self._turn = 0
        self._held: dict[int, list[bytes]] = {}
        #: Requests that have ended before it was their turn.
        self._over: set[int] = set()

    def is_turn_of(self, number: int) -> bool:
        """Whether unfinished pictures of this request may be sent."""
        return self._are_kept and number == self._turn

    def finished(self, number: int, event: bytes) -> list[bytes]:
        """The events that are sent now that this one of a finished picture is there."""
        if not self._are_kept or self.is_turn_of(number):
            return [event]
        self._held.setdefault(number, []).append(event)
        return []

    def request_over(self, number: int) -> list[bytes]:
        """The events that are sent now that a request has ended."""
        self._over.add(number)
        sent: list[bytes] = []
        while self._turn in self._over:
            self._turn += 1
            sent += self._held.pop(self._turn, [])
        return sent

    def rest(self) -> list[bytes]:
        """All that is held: no request goes on."""
        held, self._held = self._held, {}
        return [event for _, events in sorted(held.items()) for event in events]
