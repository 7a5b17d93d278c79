"""When a line about readiness is due: at each change, and now and then while something is missing. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: The least time between two lines while something is missing: of a change, and without one. Both grow with the time
#: that it lasts, so that an hour leaves a dozen lines.
_CHANGED_S: Final = 1.0
_CHANGED_PART: Final = 0.1
_REPEATED_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Ready:
    """Nothing is missing any more, ``after_s`` after the start or after the loss."""

    after_s: float


@dataclass(frozen=True, slots=True)
class NotReady:
    """Something is missing that was there until now."""


@dataclass(frozen=True, slots=True)
class StillMissing:
    """Something has been missing for ``after_s``, since the start or since a loss."""

    after_s: float


ReadinessNews = Ready | NotReady | StillMissing


class ReadinessLog:
    """Told again and again what is missing, it returns what there is to log. ``now_s`` is monotonic seconds."""

    def __init__(self, now_s: float) -> None:
        self._since_s = now_s
        self._is_ready = False
        #: What the last line called missing, and when that was; None before the first line.
        self._told: str | None = None
        self._told_at_s = now_s

    def observe(self, missing: str, now_s: float) -> ReadinessNews | None:
        """What to log now; None for nothing. ``missing`` names what is missing, empty for nothing."""
        lasts_s = now_s - self._since_s
        if not missing:
            was_ready, self._is_ready = self._is_ready, True
            return None if was_ready else Ready(lasts_s)
        if self._is_ready:
            self._is_ready = False
            self._since_s = now_s
            return self._tell(missing, now_s, NotReady())
        waited_s = now_s - self._told_at_s
        changed_due = missing != self._told and waited_s >= max(_CHANGED_S, _CHANGED_PART * lasts_s)
        repeat_due = waited_s >= max(_REPEATED_S, lasts_s / 2)
        if self._told is None or changed_due or repeat_due:
            return self._tell(missing, now_s, StillMissing(lasts_s))
        return None

    def _tell(self, missing: str, now_s: float, news: ReadinessNews) -> ReadinessNews:
        self._told, self._told_at_s = missing, now_s
        return news
