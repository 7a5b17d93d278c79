"""Refusals: requests that were turned away before they began leave a count, and now and then a line in the log."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from omni_discovery.errors import InvalidRequestError, RequestError, StageUnavailableError

if TYPE_CHECKING:
    from hub.metrics import HubMetrics

logger = logging.getLogger(__name__)

#: How often at most one kind of error is told.
_QUIET_S: Final = 5.0


def log_revocation(hub_id: str, *, before: bool, now: bool) -> None:
    """Say when an operator has shut this hub out, and when it is let in again."""
    if now and not before:
        logger.error("hub.revoked hub=%s: no replica listens to it; omni hub allow lets it in again", hub_id)
    elif before and not now:
        logger.warning("hub.allowed hub=%s: replicas listen to it again", hub_id)


class Refusals:
    """Lives on the hub's loop."""

    def __init__(self, metrics: HubMetrics, quiet_s: float = _QUIET_S) -> None:
        self._metrics = metrics
        self._quiet_s = quiet_s
        #: What has come since the last line, by what the line is about; the last one says why.
        self._untold: Counter[str] = Counter()
        self._reasons: dict[str, Exception] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the request whose admission fails inside."""
        try:
            yield
        except RequestError as error:
            self.count(error)
            raise

    def count(self, error: RequestError) -> None:
        """A request never began."""
        self._metrics.requests.labels(type(error).__name__).inc()
        self._note(f"hub.refused error={type(error).__name__}", error)

    def failed(self, error: Exception) -> None:
        """A request has failed that was taken: only a stage that has nobody is worth a line."""
        if isinstance(error, StageUnavailableError):
            self._note(f"hub.stage_unavailable stage={error.stage_id}", error)

    def close(self) -> None:
        """Tell what is left to be told. Idempotent."""
        for what, timer in self._timers.items():
            timer.cancel()
            self._tell(what)
        self._timers.clear()

    def _note(self, what: str, error: Exception) -> None:
        self._untold[what] += 1
        self._reasons[what] = error
        if what not in self._timers:
            # The first at once, and the count of those that follow when the time is over.
            self._again(what)

    def _again(self, what: str) -> None:
        self._timers.pop(what, None)
        if self._tell(what):
            loop = asyncio.get_running_loop()
            self._timers[what] = loop.call_later(self._quiet_s, self._again, what)

    def _tell(self, what: str) -> bool:
        count = self._untold.pop(what, 0)
        if count:
            reason = self._reasons[what]
            # A client's own mistake is its own affair; the others are the operator's.
            level = logging.INFO if isinstance(reason, InvalidRequestError) else logging.WARNING
            logger.log(level, "%s count=%d: %s", what, count, str(reason)[:300])
        return bool(count)
