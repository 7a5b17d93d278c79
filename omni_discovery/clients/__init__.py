"""Clients of the registry: OmniCoordClientForStage for a replica, OmniCoordClientForHub for a hub.

Both are thread-safe. Each owns one thread with its own event loop and its own connection to etcd, so that a busy engine
or hub can't delay lease renewals. Callbacks are called on that thread and must be quick.
"""

from __future__ import annotations

from omni_discovery.clients.hub import OmniCoordClientForHub
from omni_discovery.clients.stage import OmniCoordClientForStage

__all__ = ["OmniCoordClientForHub", "OmniCoordClientForStage"]
