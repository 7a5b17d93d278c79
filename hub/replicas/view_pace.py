"""ViewPace: when the next view of the registry is applied. Pure.

Going through a view takes the longer the more records there are. Where views come faster than that, as when somebody
writes thousands of records, only the latest counts; requests must have the rest of the loop's time.
"""

from __future__ import annotations

from typing import Final

#: After a view the loop has this many times as long for everything else.
_REST: Final = 4.0
#: The longest pause, unless the view itself took longer: a replica that has gone is not picked for longer than its own
#: silence takes to show.
_MOST_S: Final = 0.25


class ViewPace:
    """Moments are monotonic."""

    def __init__(self) -> None:
        self._not_before_s = float("-inf")

    def __repr__(self) -> str:
        return f"ViewPace(not before {self._not_before_s:.3f})"

    def applied(self, began_s: float, ended_s: float) -> None:
        """A view was applied between these moments."""
        took_s = ended_s - began_s
        self._not_before_s = ended_s + max(took_s, min(_MOST_S, _REST * took_s))

    def delay_s(self, now_s: float) -> float:
        """How long the next view has to wait."""
        return max(0.0, self._not_before_s - now_s)
