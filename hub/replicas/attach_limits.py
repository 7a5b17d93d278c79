"""AttachLimits: which replicas may be connected to now, and which have to wait. Pure.

A replica waits while this process is out of file descriptors, and while too many others have never answered: records of
nobody must not use up the connections of those that serve. Those whose record has a lease, as every replica's does, go
before the others; where nobody listens a turn is short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

#: Connections to replicas that have never answered, at the same time; fewer where descriptors are scarce.
MOST_UNANSWERED: Final = 256
#: Descriptors of the three sockets of one replica, with two monitors and the connections.
_DESCRIPTORS_EACH: Final = 10
#: After so long one that has never answered gives its turn to one that waits; sooner if there is no connection to it.
TURN_S: Final = 30.0
UNCONNECTED_TURN_S: Final = 5.0
#: Bounds of the pause after this process ran out of descriptors, and the time between two looks at those that wait.
_FIRST_PAUSE_S: Final = 1.0
_MOST_PAUSE_S: Final = 30.0
_REVIEW_S: Final = 1.0
#: So many are connected to, and so many give their turn, in one turn of the loop: requests must get in between.
AT_ONCE: Final = 4
#: Who has answered is looked up at most so often, however many records come at once.
_LOOK_S: Final = 0.1


def most_unanswered(descriptors: int) -> int:
    """How many replicas that have never answered may be connected to, with so many descriptors: a quarter of them."""
    return max(1, min(MOST_UNANSWERED, descriptors // 4 // _DESCRIPTORS_EACH))


class AttachLimits:
    """Replicas go by their input address. ``has_answered``: whether one has ever had a session. Moments: monotonic.

    ``is_leased``: whether its record ends with a lease. ``is_connected``: whether the connections to it stand.
    """

    def __init__(
        self,
        has_answered: Callable[[str], bool],
        most: int,
        is_leased: Callable[[str], bool],
        is_connected: Callable[[str], bool],
    ) -> None:
        self._has_answered = has_answered
        self._most_unanswered = most
        self._is_leased, self._is_connected = is_leased, is_connected
        #: Those that wait, the one that has waited longest first.
        self._waiting: dict[str, None] = {}
        #: Of these, those that have had a turn before.
        self._tried: set[str] = set()
        #: When those were connected to that had not answered by then, in that order.
        self._unanswered: dict[str, float] = {}
        self._pause_s = 0.0
        self._not_before_s = float("-inf")
        #: When those that wait are looked at next.
        self._review_s = float("-inf")
        self._look_s = float("-inf")

    def __repr__(self) -> str:
        return f"AttachLimits({len(self._waiting)} waiting, {len(self._unanswered)} unanswered)"

    @property
    def next_review_s(self) -> float | None:
        """When time alone lets one that waits be tried; None if none waits."""
        return max(self._not_before_s, self._review_s) if self._waiting else None

    def must_wait(self, addr: str, now_s: float) -> str:
        """Why the replica may not be connected to now, so that it waits; empty if it may."""
        if now_s < self._not_before_s:
            reason = "this hub has no file descriptor left for it"
        elif not self._has_room(now_s):
            reason = f"it waits for its turn: {self._most_unanswered} others have never answered"
        else:
            return ""
        self._waiting.setdefault(addr)
        return reason

    def attached(self, addr: str, now_s: float) -> bool:
        """The replica is being connected to; return whether for the first time since it has come."""
        is_first = addr not in self._tried
        self._tried.discard(addr)
        self._waiting.pop(addr, None)
        self._unanswered[addr] = now_s
        self._pause_s = 0.0
        return is_first

    def postpone(self, addr: str) -> None:
        """The replica has had a turn, and waits behind all others."""
        self._waiting.setdefault(addr)
        self._tried.add(addr)

    def continue_at(self, moment_s: float, addr: str = "") -> None:
        """There is more to do than one turn of the loop allows: those that wait, and ``addr``, are looked at then."""
        if addr:
            self._waiting.setdefault(addr)
        self._review_s = moment_s

    def ran_out(self, addr: str, now_s: float) -> None:
        """There was no descriptor for the replica: it waits, and all others with it, for a while that grows."""
        self._waiting.setdefault(addr)
        self._pause_s = min(_MOST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * self._pause_s))
        self._not_before_s = now_s + self._pause_s

    def gone(self, addr: str) -> None:
        """The replica is connected to no more, and does not wait. Unknown ones are fine."""
        self._waiting.pop(addr, None)
        self._tried.discard(addr)
        self._unanswered.pop(addr, None)

    def review(self, now_s: float) -> tuple[list[str], list[str]]:
        """Return some that wait, to be tried in this order, and some that must give their turn to them before."""
        self._review_s = now_s + _REVIEW_S
        if now_s < self._not_before_s:
            return [], []
        leased, others = self._first_waiting()
        self._look_s = now_s
        if self._has_room(now_s):
            return [*leased, *others], []
        tried_leased, tried_others = self._by_lease(self._unanswered)
        late_leased = [addr for addr in tried_leased if self._is_late(addr, now_s)]
        late_others = [addr for addr in tried_others if self._is_late(addr, now_s)]
        # Those with a lease need not wait until the turn of one without is over, and give theirs only to each other.
        for_leased = list(dict.fromkeys([*late_others, *tried_others, *late_leased]))[: len(leased)]
        for_others = [addr for addr in late_others if addr not in for_leased][: len(others)]
        return [*leased, *others], [*for_leased, *for_others][:AT_ONCE]

    def _first_waiting(self) -> tuple[list[str], list[str]]:
        """Of those that wait the first few with a lease, and the first few others unless there are enough with one."""
        leased: list[str] = []
        others: list[str] = []
        for addr in self._waiting:
            if self._is_leased(addr):
                leased.append(addr)
                if len(leased) == AT_ONCE:
                    break
            elif len(others) < AT_ONCE:
                others.append(addr)
        return leased, others

    def _by_lease(self, addrs: Iterable[str]) -> tuple[list[str], list[str]]:
        """Those with a lease, and the others, each in their order."""
        known = [(addr, self._is_leased(addr)) for addr in addrs]
        return [addr for addr, leased in known if leased], [addr for addr, leased in known if not leased]

    def _is_late(self, addr: str, now_s: float) -> bool:
        turn_s = TURN_S if self._is_connected(addr) else UNCONNECTED_TURN_S
        return now_s - self._unanswered[addr] >= turn_s

    def _has_room(self, now_s: float) -> bool:
        if len(self._unanswered) >= self._most_unanswered and now_s >= self._look_s:
            self._look_s = now_s + _LOOK_S
            self._unanswered = {addr: at_s for addr, at_s in self._unanswered.items() if not self._has_answered(addr)}
        return len(self._unanswered) < self._most_unanswered
