"""The readiness check of a replica: its connectors must reach the stores and peers that carry its hand-offs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from omni_discovery.records.schema import WAITING_PHASE
from stage_runtime.engine_loop.payloads import Payloads

logger = logging.getLogger(__name__)

#: Pause between two checks before the replica is up. Yuanrong's client rejects calls for up to 2 s after a timeout.
_WAIT_S: Final = 2.5
#: Pause between two checks while the replica is up and hand-offs fail.
_CHECK_EVERY_S: Final = 5.0


class ReadinessCheck:
    """Checks the connectors on the replica's main thread. ``describe`` updates fields of the replica's record."""

    def __init__(
        self,
        payloads: Payloads,
        describe: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._payloads = payloads
        self._describe = describe
        self._clock = clock
        self._sleep = sleep
        #: The trouble that the record shows now; empty while all connectors are healthy.
        self._shown = ""
        self._failures = 0
        self._check_at_s = clock()
        #: True while only this check keeps the replica from loading: no stall then. Read by any thread.
        self.is_waiting = False

    def wait_ready(self) -> None:
        """Block until every connector is healthy. Until then the record and the log show the cause."""
        while trouble := self._payloads.trouble():
            self.is_waiting = True
            self._show(trouble, phase=WAITING_PHASE)
            self._sleep(_WAIT_S)
        self._show("")
        self.is_waiting = False

    def check_again(self) -> None:
        """Show in the record why hand-offs fail, while they do. Connectors are checked only after a failed hand-off."""
        if not self._shown and self._failures == self._payloads.failures:
            return
        now_s = self._clock()
        if now_s >= self._check_at_s:
            self._check_at_s = now_s + _CHECK_EVERY_S
            self._failures = self._payloads.failures
            self._show(self._payloads.trouble())

    def _show(self, trouble: str, **fields: str) -> None:
        if trouble == self._shown:
            return
        self._shown = trouble
        if trouble:
            logger.warning("replica.out_of_reach reason=%s", trouble)
        else:
            logger.info("replica.in_reach")
        self._describe(reason=trouble[:1000], **fields)
