"""Backlog: how many unfinished requests still have to pass through each stage. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Backlog:
    """Counted from admission to the end of each stage's work, so that what is upstream is seen downstream."""

    def __init__(self) -> None:
        #: The stages that each unfinished request still needs.
        self._needs: dict[str, set[int]] = {}
        self._counts: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._needs)

    def of(self, stage_id: int) -> int:
        """How many unfinished requests still need the stage."""
        return self._counts[stage_id]

    def enter(self, request_id: str, stages: Iterable[int]) -> None:
        """A request was admitted that needs these stages."""
        self._needs[request_id] = set(stages)
        self._counts.update(self._needs[request_id])

    def passed(self, request_id: str, stages: Iterable[int]) -> None:
        """The request needs these stages no more. Unknown requests and stages are fine."""
        gone = self._needs.get(request_id, set()).intersection(stages)
        if gone:
            self._needs[request_id] -= gone
            self._counts.subtract(gone)

    def leave(self, request_id: str) -> None:
        """The request has ended. Unknown ones are fine."""
        self._counts.subtract(self._needs.pop(request_id, ()))
