"""LongTurns: how long a socket rests after a turn that took the hub's loop long. Pure."""

from __future__ import annotations

from typing import Final

#: Turns that use no more processor time than this are followed by no rest.
LONG_TURN_S: Final = 0.02


class LongTurns:
    """Gives the long turns of all sockets together half of the loop's time, however many sockets have them.

    Each long turn reserves the socket's next one: as long as this one was, behind those of the other sockets, and with
    as much time for everything else between any two.
    """

    def __init__(self) -> None:
        #: When the next long turn that is not reserved yet may begin.
        self._free_at_s = float("-inf")

    def rest_s(self, took_s: float, now_s: float) -> float:
        """How long a socket rests whose turn has just ended and used so much processor time; 0 for none."""
        if took_s <= LONG_TURN_S:
            return 0.0
        begins_s = max(self._free_at_s, now_s + took_s)
        self._free_at_s = begins_s + 2 * took_s
        return begins_s - now_s
