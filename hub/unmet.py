"""Unmet: a replica that is listed and does not become a session is worth one warning, with what is known of why."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from hub.zmq_loop import DealerConnection
    from omni_discovery.records.schema import ReplicaInfo

logger = logging.getLogger(__name__)

#: Whoever looks less often than that had a session in between.
_PAUSE_S: Final = 2.0

_REFUSED: Final = (
    "the handshake fails: it does not know this hub, it has another key than its record says, or something else"
    " listens there; omni doctor looks from here"
)
_NOBODY: Final = "nobody answers there: its process is gone, or the network lets nothing through"
_NOT_GREETED: Final = "it is connected and does not greet back: the registry may know another life of it"


class Unmet:
    """Of one replica. ``after_s``: how long it may take to make a session before that is told."""

    def __init__(self, after_s: float, now_s: float) -> None:
        self._after_s = after_s
        self._since_s = self._looked_s = now_s
        self._told = ""

    def look(self, info: ReplicaInfo, connections: Collection[DealerConnection], now_s: float) -> None:
        """There is no session now; called again and again while that is so."""
        if now_s - self._looked_s > _PAUSE_S:
            self._since_s, self._told = now_s, ""
        self._looked_s = now_s
        waited_s = now_s - self._since_s
        if waited_s < self._after_s:
            return
        cause = self._cause(connections, now_s)
        if cause != self._told:
            self._told = cause
            logger.warning(
                "replica.no_session stage=%d replica=%d addr=%s output_addr=%s after_s=%.1f: %s",
                info.stage_id,
                info.replica_id,
                info.input_addr,
                info.output_addr,
                waited_s,
                cause,
            )

    def _cause(self, connections: Collection[DealerConnection], now_s: float) -> str:
        lacking = [each for each in connections if not each.connected]
        if not lacking:
            return _NOT_GREETED
        # Between two attempts nobody is there for a moment.
        return _REFUSED if any(now_s - each.refused_at_s < self._after_s for each in lacking) else _NOBODY
