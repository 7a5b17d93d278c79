"""How long to wait before a process that ended by itself is started again. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Twice as long so often is beyond any bound, and still a number.
_MOST_DOUBLINGS: Final = 30


@dataclass(slots=True)
class RestartPauses:
    """Each pause is twice the one before, ``most_s`` at most; who served for ``stable_s`` begins with ``first_s``."""

    first_s: float = 0.5
    most_s: float = 30.0
    stable_s: float = 60.0
    #: Ends in a row, each before it was up or soon after.
    quick_ends: int = 0

    def ended(self, served_for_s: float) -> float:
        """The pause after an end, in seconds. ``served_for_s`` counts from when it was up, 0 if it never was."""
        self.quick_ends = 1 if served_for_s >= self.stable_s else self.quick_ends + 1
        return min(self.most_s, self.first_s * 2.0 ** min(self.quick_ends - 1, _MOST_DOUBLINGS))
