"""Backpressure: which requests are paused in the engine, and which of them are parked. Pure.

Used by the engine's thread. A request is paused for one or more of three reasons: its next stages are behind, its
client is, or its hub is with all that it gets. The engine's ``pause`` is called when the first reason appears and when
the last one is gone. A client may be behind for minutes, so a request that the engine has put aside for its client is
parked: its slot goes to others. A next stage and a hub catch up soon, so a request that waits only for these keeps its
slot.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import Enum, auto

from stage_runtime.engine_loop.jobs import Parked, RequestFailed
from stage_runtime.engine_loop.running import failed
from stage_runtime.engines.base import Engine
from stage_runtime.engines.capabilities import Capabilities

logger = logging.getLogger(__name__)


class Behind(Enum):
    """Which consumer is behind with a request's output."""

    NEXT_STAGES = auto()
    CLIENT = auto()
    HUB = auto()


class Pauses:
    """The pauses of one engine. An engine without ``pause`` is never paused.

    Methods return the outcomes to emit; a request with a RequestFailed among them was aborted in the engine.
    """

    def __init__(self, engine: Engine, capabilities: Capabilities) -> None:
        self._engine = engine
        self._pause = capabilities.pause
        self._reasons: dict[str, set[Behind]] = {}
        #: Whether the engine's last call of ``pause`` paused the request, by the key of each request that it works on.
        self._in_engine: dict[str, bool] = {}
        #: Requests that the engine has put aside, and those of them that are parked.
        self._set_aside: set[str] = set()
        self._parked_keys: set[str] = set()

    def request_started(self, key: str) -> Sequence[RequestFailed | Parked]:
        """The engine has accepted the request, or its next segment."""
        self._in_engine[key] = False
        return self._apply(key)

    def request_ended(self, key: str) -> None:
        """The engine has ended or aborted the request, or its present segment."""
        self._in_engine.pop(key, None)

    def forget_request(self, key: str) -> None:
        """Drop all state of a request that has ended."""
        self._reasons.pop(key, None)
        self._set_aside.discard(key)
        self._parked_keys.discard(key)
        self.request_ended(key)

    def set_behind(self, key: str, who: Behind, *, is_behind: bool) -> Sequence[RequestFailed | Parked]:
        """Note that the consumer ``who`` has fallen behind with a request's output, or has caught up."""
        reasons = self._reasons.setdefault(key, set())
        (reasons.add if is_behind else reasons.discard)(who)
        if not reasons:
            del self._reasons[key]
        return self._apply(key)

    def _apply(self, key: str) -> Sequence[RequestFailed | Parked]:
        is_paused = key in self._reasons
        if self._pause is None or self._in_engine.get(key, is_paused) == is_paused:
            return self._parked(key)
        self._in_engine[key] = is_paused
        try:
            is_aside = self._pause(key, is_paused)
        except Exception as error:
            # The engine is not in a step, so the other requests in it are unharmed.
            logger.exception("engine.pause_failed")
            self.forget_request(key)
            self._engine.abort(key)
            return [failed(key, error)]
        (self._set_aside.add if is_paused and is_aside is True else self._set_aside.discard)(key)
        return self._parked(key)

    def _parked(self, key: str) -> Sequence[Parked]:
        is_parked = key in self._set_aside and Behind.CLIENT in self._reasons.get(key, ())
        if is_parked == (key in self._parked_keys):
            return ()
        (self._parked_keys.add if is_parked else self._parked_keys.discard)(key)
        return [Parked(key, is_parked)]
