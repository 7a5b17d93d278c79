"""Backlog: how many unfinished requests still have to pass through each stage, of each version of it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

_NO_VERSIONS: Final[Mapping[int, str]] = MappingProxyType({})


class Backlog:
    """Counted from admission to the end of each stage's work, so that what is upstream is seen downstream."""

    def __init__(self) -> None:
        #: The stages that each unfinished request still needs, with the fingerprint of the version that it needs.
        self._needs: dict[str, dict[int, str]] = {}
        self._counts: Counter[tuple[int, str]] = Counter()

    def __len__(self) -> int:
        return len(self._needs)

    def of(self, stage_id: int, fingerprint: str = "") -> int:
        """How many unfinished requests still need that version of the stage."""
        return self._counts[stage_id, fingerprint]

    def enter(self, request_id: str, stages: Iterable[int], fingerprints: Mapping[int, str] = _NO_VERSIONS) -> None:
        """A request was admitted, or moved to other versions, that needs these stages."""
        self.leave(request_id)
        needs = self._needs[request_id] = {stage_id: fingerprints.get(stage_id, "") for stage_id in stages}
        self._counts.update(needs.items())

    def passed(self, request_id: str, stages: Iterable[int]) -> None:
        """The request needs these stages no more. Unknown requests and stages are fine."""
        needs = self._needs.get(request_id, {})
        for stage_id in stages:
            if stage_id in needs:
                self._counts[stage_id, needs.pop(stage_id)] -= 1

    def leave(self, request_id: str) -> None:
        """The request has ended. Unknown ones are fine."""
        self._counts.subtract(self._needs.pop(request_id, {}).items())
