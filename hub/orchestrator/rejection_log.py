"""RejectionLog: counts requests that were rejected before they began, and logs each kind of rejection now and then."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from omni_discovery.errors import InvalidRequestError, OverloadedError, RequestError

if TYPE_CHECKING:
    from hub.metrics import HubMetrics

logger = logging.getLogger(__name__)

#: The least time between two log lines about one kind of error.
_QUIET_S: Final = 5.0


def log_revocation(hub_id: str, *, before: bool, now: bool) -> None:
    """Log that an operator has revoked this hub, or has allowed it again; nothing if that did not change."""
    if now and not before:
        logger.error("hub.revoked hub=%s: no replica listens to it; omni hub allow lets it in again", hub_id)
    elif before and not now:
        logger.warning("hub.allowed hub=%s: replicas listen to it again", hub_id)


class RejectionLog:
    """Lives on the hub's loop. The first rejection of a kind is logged at once, later ones as a count each 5 s."""

    def __init__(
        self,
        metrics: HubMetrics,
        quiet_s: float = _QUIET_S,
        on_overload: Callable[[OverloadedError], None] = lambda _error: None,
    ) -> None:
        """``on_overload`` is called with each request that was refused because there was no room for it."""
        self._metrics = metrics
        self._on_overload = on_overload
        self._quiet_s = quiet_s
        #: Rejections since the last line, by the text that the line begins with; and the last error of each.
        self._unlogged: Counter[str] = Counter()
        self._reasons: dict[str, Exception] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the RequestError that is raised inside, and raise it again."""
        try:
            yield
        except RequestError as error:
            self.count(error)
            raise

    def count(self, error: RequestError) -> None:
        """Count a request that was rejected for this error."""
        self._metrics.requests.labels(type(error).__name__).inc()
        if isinstance(error, OverloadedError):
            self._on_overload(error)
        self._note(f"hub.refused error={type(error).__name__}", error)

    def close(self) -> None:
        """Log the counts that are not logged yet. Idempotent."""
        for event, timer in self._timers.items():
            timer.cancel()
            self._log(event)
        self._timers.clear()

    def _note(self, event: str, error: Exception) -> None:
        self._unlogged[event] += 1
        self._reasons[event] = error
        if event not in self._timers:
            self._log_and_wait(event)

    def _log_and_wait(self, event: str) -> None:
        self._timers.pop(event, None)
        if self._log(event):
            loop = asyncio.get_running_loop()
            self._timers[event] = loop.call_later(self._quiet_s, self._log_and_wait, event)

    def _log(self, event: str) -> bool:
        count = self._unlogged.pop(event, 0)
        if count:
            reason = self._reasons[event]
            # The operator can't change a client's mistake; all other rejections concern the operator.
            level = logging.INFO if isinstance(reason, InvalidRequestError) else logging.WARNING
            logger.log(level, "%s count=%d: %s", event, count, str(reason)[:300])
        return bool(count)
