"""LongTurns: how long a socket rests after a turn that took the hub's loop long. Pure."""

from __future__ import annotations

from typing import Final

#: Turns that use no more processor time than this are followed by no rest.
LONG_TURN_S: Final = 0.02
#: The most that the events of one turn count.
_MOST_OWED_S: Final = 0.3
#: The most that one control message counts. One lately dear event must not be the price of all others.
_MOST_EVENT_S: Final = 0.0002
#: Events that may wait to be handled before no socket is read, and how few do until they are read again.
_MOST_WAITING: Final = 20_000
_FEW_WAITING: Final = 10_000


class LongTurns:
    """Gives the long turns of all sockets together half of the loop's time, however many sockets have them.

    Each long turn reserves the socket's next one: as long as this one was, behind those of the other sockets, and with
    as much time for everything else between any two. What a turn takes is the time to read its messages, and to handle
    the control messages and refused frames among them, which comes later. What replicas say of requests is not counted:
    at full load it may take more than half of the time.
    """

    def __init__(self) -> None:
        #: Control messages and refused frames so far, and how long an event lately took to be handled.
        self.posted = 0
        self._event_s = 0.0
        #: Whether too many events wait: then no socket is read.
        self.is_behind = False
        #: When the next long turn that is not reserved yet may begin.
        self._free_at_s = float("-inf")

    def note_waiting(self, count: int) -> None:
        """So many events wait to be handled."""
        self.is_behind = count > (_FEW_WAITING if self.is_behind else _MOST_WAITING)

    def note_handled(self, count: int, took_s: float) -> None:
        """So many events were handled in so much processor time."""
        if count:
            self._event_s += min(0.3, count / 300) * (min(took_s / count, _MOST_EVENT_S) - self._event_s)

    def owed_s(self, posted_before: int) -> float:
        """The processor time that the events will take which were posted since ``posted`` was that."""
        return min(_MOST_OWED_S, (self.posted - posted_before) * self._event_s)

    def rest_s(self, took_s: float, now_s: float) -> float:
        """How long a socket rests whose turn has just ended and used so much processor time; 0 for none."""
        if took_s <= LONG_TURN_S:
            return 0.0
        begins_s = max(self._free_at_s, now_s + took_s)
        self._free_at_s = begins_s + 2 * took_s
        return begins_s - now_s
