"""Freshness: when a hub writes its beat, and when a view with an open watch counts as stale.

A watch that brings nothing may be idle or broken, and servers have reported progress that they had not made. So a hub
writes a key and waits for the write to arrive on the same watch: everything written before it has then arrived, too.
A list and a change that arrives are proofs as well. A view without a proof for ``longest_unproved_s`` is stale. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: A watch that brought something within this time needs no beat.
QUIET_S: Final = 1.0
#: The longest that a beat may take from its write to the watch: a silent etcd is noticed ``QUIET_S`` later at most.
LONGEST_ECHO_S: Final = 2.0
#: Beats written per second, by all hubs of a namespace together.
BEATS_PER_S: Final = 20.0
#: The pause after a beat that could not be written, though the registry answered.
_REFUSED_PAUSE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class WriteBeat:
    """Write the beat with this number."""

    counter: int


@dataclass(frozen=True, slots=True)
class Distrust:
    """The beat did not arrive in time: the view is proved fresh only as of ``fresh_at_s``, monotonic."""

    fresh_at_s: float


class Freshness:
    """Proofs of one hub's view. Moments are monotonic seconds; ``hubs`` counts live hubs, this one included."""

    def __init__(self, echo_timeout_s: float) -> None:
        self._echo_timeout_s = echo_timeout_s
        #: The last proof: all writes up to this moment are in the view.
        self.fresh_at_s = float("-inf")
        self._heard_at_s = float("-inf")
        self._not_before_s = float("-inf")
        self._beat_at_s = float("-inf")
        self._counter = 0
        self._is_out = False
        self._is_asked = False

    def __repr__(self) -> str:
        beat = f"beat {self._counter} sent at {self._beat_at_s:.1f}" if self._is_out else f"beats={self._counter}"
        return f"Freshness(fresh at {self.fresh_at_s:.1f}, {beat})"

    def watch_opened(self, listed_at_s: float, now_s: float) -> None:
        """A watch is open after a list that was requested at ``listed_at_s``."""
        self.fresh_at_s = max(self.fresh_at_s, listed_at_s)
        self._heard_at_s = now_s
        self._is_out = False

    def news_arrived(self, now_s: float) -> None:
        """The watch brought a change other than a beat. It is a proof, except while a beat is out: its echo decides."""
        self._heard_at_s = now_s
        if not self._is_out:
            self.fresh_at_s = max(self.fresh_at_s, now_s)

    def request_beat(self) -> None:
        """A replica waits for this hub's acknowledgement, or its report changed: beat as soon as the rate allows."""
        self._is_asked = True

    def beat_echoed(self, now_s: float) -> float | None:
        """The last beat has arrived on the watch. Return how many seconds after its write; None: none was out."""
        if not self._is_out:
            return None
        self._is_out = False
        self.fresh_at_s = max(self.fresh_at_s, self._beat_at_s)
        return now_s - self._beat_at_s

    def beat_refused(self, listed_at_s: float, now_s: float) -> None:
        """The beat could not be written, but a list requested at ``listed_at_s`` was answered."""
        self._is_out = False
        self.fresh_at_s = max(self.fresh_at_s, listed_at_s)
        self._not_before_s = now_s + _REFUSED_PAUSE_S

    def longest_unproved_s(self, hubs: int) -> float:
        """How long after its last proof a view may be called fresh, in seconds: one beat's pause and its way back."""
        return max(QUIET_S, hubs / BEATS_PER_S) + self._echo_timeout_s

    def due_s(self, hubs: int) -> float:
        """When to call ``tick`` next."""
        if self._is_out:
            return self._beat_at_s + self._echo_timeout_s
        budget_s = hubs / BEATS_PER_S
        if self._is_asked:
            return max(self._beat_at_s + budget_s, self._not_before_s)
        return max(self._beat_at_s + max(QUIET_S, budget_s), self._not_before_s, self._heard_at_s + QUIET_S)

    def tick(self, now_s: float, hubs: int) -> WriteBeat | Distrust | None:
        """The action that is due at ``now_s``; None if none is."""
        if now_s < self.due_s(hubs):
            return None
        if self._is_out:
            self._is_out = False
            return Distrust(self.fresh_at_s)
        self._counter += 1
        self._beat_at_s, self._is_out, self._is_asked = now_s, True, False
        return WriteBeat(self._counter)
