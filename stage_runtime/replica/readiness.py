"""The readiness check of a replica: its connectors reach what carries its hand-offs, and none of its slots is lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from omni_discovery.records.schema import WAITING_PHASE
from stage_runtime.engine_loop.payloads import Payloads
from stage_runtime.server.credits import NO_LOST_SLOTS, LostSlots

logger = logging.getLogger(__name__)

#: Pause between two checks before the replica is up. Yuanrong's client rejects calls for up to 2 s after a timeout.
_WAIT_S: Final = 2.5
#: Pause between two checks while the replica is up and hand-offs fail.
_CHECK_EVERY_S: Final = 5.0


class ReadinessCheck:
    """Checks connectors and slots on the replica's main thread. ``describe`` updates fields of the replica's record."""

    def __init__(
        self,
        payloads: Payloads,
        describe: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        lost_slots: Callable[[], LostSlots] = lambda: NO_LOST_SLOTS,
    ) -> None:
        self._payloads = payloads
        self._describe = describe
        self._clock = clock
        self._sleep = sleep
        self._lost_slots = lost_slots
        #: The trouble of connectors that the record shows now; empty while all are healthy.
        self._shown = ""
        #: The lost slots that it shows.
        self._shown_lost = NO_LOST_SLOTS
        self._failures = 0
        self._check_at_s = clock()
        #: True while only this check keeps the replica from loading: no stall then. Read by any thread.
        self.is_waiting = False

    def wait_ready(self) -> None:
        """Block until every connector is healthy. Until then the record and the log show the cause."""
        while trouble := self._payloads.trouble():
            self.is_waiting = True
            self._show(trouble, NO_LOST_SLOTS, phase=WAITING_PHASE)
            self._sleep(_WAIT_S)
        self._show("", NO_LOST_SLOTS)
        self.is_waiting = False

    def check_again(self) -> None:
        """Show in the record why hand-offs fail, and which slots are lost, while it is so.

        Connectors are checked only after a failed hand-off.
        """
        lost = self._lost_slots()
        has_failed = bool(self._shown) or self._failures != self._payloads.failures
        if not has_failed and lost == self._shown_lost:
            return
        now_s = self._clock()
        if now_s >= self._check_at_s:
            self._check_at_s = now_s + _CHECK_EVERY_S
            self._failures = self._payloads.failures
            self._show(self._payloads.trouble() if has_failed else "", lost)

    def _show(self, trouble: str, lost: LostSlots, **fields: object) -> None:
        if (trouble, lost) == (self._shown, self._shown_lost):
            return
        if trouble != self._shown:
            if trouble:
                logger.warning("replica.out_of_reach reason=%s", trouble)
            else:
                logger.info("replica.in_reach")
        if lost != self._shown_lost:
            fields["lost_slots"] = lost.count
            if lost.count:
                logger.warning("replica.slots_lost count=%d reason=%s", lost.count, lost.reason)
            else:
                logger.info("replica.slots_back")
        self._shown, self._shown_lost = trouble, lost
        self._describe(reason="; ".join(filter(None, (trouble, lost.reason)))[:1000], **fields)
