"""LongTurns: how long a socket rests after a turn that took the hub's loop long. Pure."""

from __future__ import annotations

from typing import Final

#: Turns that use no more processor time than this are followed by no rest.
LONG_TURN_S: Final = 0.02
#: How much the last events count in the mean time that one takes.
_SHARE_OF_LAST: Final = 0.3


class LongTurns:
    """Gives the long turns of all sockets together half of the loop's time, however many sockets have them.

    Each long turn reserves the socket's next one: as long as this one was, behind those of the other sockets, and with
    as much time for everything else between any two. What a turn takes is the time to read its messages, and the time
    to handle the events that they have posted, which comes later.
    """

    def __init__(self) -> None:
        #: Events that were posted so far, and how long one lately took to be handled.
        self.posted = 0
        self._event_s = 0.0
        #: When the next long turn that is not reserved yet may begin.
        self._free_at_s = float("-inf")

    def note_handled(self, count: int, took_s: float) -> None:
        """So many events were handled in so much processor time."""
        if count:
            self._event_s += _SHARE_OF_LAST * (took_s / count - self._event_s)

    def owed_s(self, posted_before: int) -> float:
        """The processor time that the events will take which were posted since ``posted`` was that."""
        return (self.posted - posted_before) * self._event_s

    def rest_s(self, took_s: float, now_s: float) -> float:
        """How long a socket rests whose turn has just ended and used so much processor time; 0 for none."""
        if took_s <= LONG_TURN_S:
            return 0.0
        begins_s = max(self._free_at_s, now_s + took_s)
        self._free_at_s = begins_s + 2 * took_s
        return begins_s - now_s
