"""Whether a replica's connectors reach what carries its hand-offs: waited for before it is up, told while it is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from omni_discovery.records.schema import WAITING_PHASE
from stage_runtime.engine_loop.payloads import Payloads

logger = logging.getLogger(__name__)

#: Longer than Yuanrong's client stays silent after a call without an answer.
_WAIT_S: Final = 2.5
#: Between two looks, once a hand-off has failed.
_LOOK_EVERY_S: Final = 5.0


class Reach:
    """Belongs to the replica's main thread. ``describe`` puts fields into its record."""

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
        #: What the record says of it; empty while all is well.
        self._told = ""
        self._failures = 0
        self._look_at_s = clock()
        #: Whether the replica stands still for want of that, and of nothing else. Read by any thread.
        self.is_waiting = False

    def wait(self) -> None:
        """Return when every connector is well. Until then the record says what is missing, and so does the log."""
        while trouble := self._payloads.trouble():
            self.is_waiting = True
            self._tell(trouble, phase=WAITING_PHASE)
            self._sleep(_WAIT_S)
        self._tell("")
        self.is_waiting = False

    def look(self) -> None:
        """Say in the record why hand-offs fail, as long as they do. Asks nobody unless one has failed."""
        if not self._told and self._failures == self._payloads.failures:
            return
        now_s = self._clock()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + _LOOK_EVERY_S
            self._failures = self._payloads.failures
            self._tell(self._payloads.trouble())

    def _tell(self, trouble: str, **fields: str) -> None:
        if trouble == self._told:
            return
        self._told = trouble
        if trouble:
            logger.warning("replica.out_of_reach reason=%s", trouble)
        else:
            logger.info("replica.in_reach")
        self._describe(reason=trouble[:1000], **fields)
