"""Which requests the engine is to make no output of for now, for whatever reasons. Pure.

Used by the engine's thread. There are two reasons: the next stages are behind, and the client is. The engine is told
when the first comes and when the last has gone. A client may be behind for minutes, so a request that the engine has
put aside meanwhile gives its slot to others; a next stage is not behind for long.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from enum import Enum, auto

from stage_runtime.engine_loop.jobs import Parked, RequestFailed
from stage_runtime.engine_loop.running import broken
from stage_runtime.engines.base import Engine

logger = logging.getLogger(__name__)


class Behind(Enum):
    """Who is behind."""

    NEXT_STAGES = auto()
    CLIENT = auto()


class Pauses:
    """An engine without ``pause`` is told nothing, and goes on. What is returned has been taken from the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pause: Callable[[str, bool], bool | None] | None = getattr(engine, "pause", None)
        self._reasons: dict[str, set[Behind]] = {}
        #: Requests that the engine works on, and whether it was told last to pause.
        self._in_engine: dict[str, bool] = {}
        #: Those that it has put aside, and those of them whose slots are free.
        self._aside: set[str] = set()
        self._resting: set[str] = set()

    def began(self, key: str) -> Sequence[RequestFailed | Parked]:
        """The engine has got the request, or its next segment."""
        self._in_engine[key] = False
        return self._tell(key)

    def ended(self, key: str) -> None:
        """The engine has said the last of it, or was told to stop it; a next segment may come."""
        self._in_engine.pop(key, None)

    def close(self, key: str) -> None:
        """The request is over."""
        self._reasons.pop(key, None)
        self._aside.discard(key)
        self._resting.discard(key)
        self.ended(key)

    def set(self, key: str, who: Behind, *, is_behind: bool) -> Sequence[RequestFailed | Parked]:
        """Somebody who takes the request's output has fallen behind, or has caught up."""
        reasons = self._reasons.setdefault(key, set())
        (reasons.add if is_behind else reasons.discard)(who)
        if not reasons:
            del self._reasons[key]
        return self._tell(key)

    def _tell(self, key: str) -> Sequence[RequestFailed | Parked]:
        is_paused = key in self._reasons
        if self._pause is None or self._in_engine.get(key, is_paused) == is_paused:
            return self._rests(key)
        self._in_engine[key] = is_paused
        try:
            is_aside = self._pause(key, is_paused)
        except Exception as error:
            # The engine is not stepped here: what one request broke is that request's own.
            logger.exception("engine.pause_failed")
            self.close(key)
            self._engine.abort(key)
            return [broken(key, error)]
        (self._aside.add if is_paused and is_aside is True else self._aside.discard)(key)
        return self._rests(key)

    def _rests(self, key: str) -> Sequence[Parked]:
        is_parked = key in self._aside and Behind.CLIENT in self._reasons.get(key, ())
        if is_parked == (key in self._resting):
            return ()
        (self._resting.add if is_parked else self._resting.discard)(key)
        return [Parked(key, is_parked)]
