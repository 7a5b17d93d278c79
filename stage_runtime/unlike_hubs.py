"""Hubs that a replica can't talk to, because what one encrypts the other does not: each is told of once."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from omni_discovery.commands.flags import CURVE
from omni_discovery.records.schema import HubRecord

logger = logging.getLogger(__name__)


class UnlikeHubs:
    """Used by one thread."""

    def __init__(self, *, is_secured: bool) -> None:
        self._is_secured = is_secured
        self._told: set[str] = set()

    def tell(self, hubs: Mapping[str, HubRecord]) -> None:
        """Warn of those among these that nobody was warned of before."""
        for hub_id, hub in hubs.items():
            if bool(hub.curve_public_key) is not self._is_secured and hub_id not in self._told:
                self._told.add(hub_id)
                theirs, ours = ("none", CURVE) if self._is_secured else (CURVE, "none")
                text = "hub.unusable hub=%s: it speaks with --zmq-security %s, this replica with %s; they must agree"
                logger.warning(text, hub_id, theirs, ours)
