"""Outage: tells once that an etcd has gone away, and once that it is back. Who uses the connection need not say it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)


class Outage:
    """Of one connection. A call has failed if no endpoint answered it for as long as it was tried."""

    def __init__(self, endpoints: Sequence[str], now: Callable[[], float] = time.monotonic) -> None:
        self._endpoints = ",".join(endpoints)
        self._now = now
        #: Since when no call was answered, monotonic; None while they are.
        self._since_s: float | None = None

    def failed(self, reason: object) -> None:
        """Nobody answered a call."""
        if self._since_s is None:
            self._since_s = self._now()
            logger.warning("etcd.away endpoints=%s reason=%s", self._endpoints, reason)

    def answered(self) -> None:
        """Somebody answered a call."""
        if self._since_s is not None:
            after_s, self._since_s = self._now() - self._since_s, None
            logger.info("etcd.back endpoints=%s after_s=%.1f", self._endpoints, after_s)
