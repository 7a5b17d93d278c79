"""What a starting hub waits for: every stage able to serve, for as long as ``--init-timeout`` allows. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hub.pool.status import StageStatus


class StartWatch:
    """Tells once that the time is over, unless every stage was able to serve before."""

    def __init__(self, limit_s: float | None, began_s: float) -> None:
        self._limit_s = limit_s
        self._until_s = None if limit_s is None else began_s + limit_s

    @property
    def is_waiting(self) -> bool:
        """Whether there is a limit, and not every stage was able to serve yet."""
        return self._until_s is not None

    def overdue(self, stages: Sequence[StageStatus], now_s: float) -> str:
        """Return why the hub has to end at ``now_s``, by its monotonic clock; empty if it goes on."""
        empty = [stage for stage in stages if not stage.pickable]
        if self._until_s is None or not empty:
            self._until_s = None
            return ""
        if now_s < self._until_s:
            return ""
        named = ", ".join(f"stage {stage.stage_id} ({stage.why_absent or 'none is registered'})" for stage in empty)
        return f"not ready within {self._limit_s:g} s (--init-timeout): no replica can take work of {named}"
