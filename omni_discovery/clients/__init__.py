"""The two faces of the registry for programs: OmniCoordClientForStage and OmniCoordClientForHub.

Both are plain, thread-safe objects. Each owns one thread with its own loop and its own connection to etcd, so that a
busy engine or a busy hub can't starve the lease. Functions given to them are called on that thread and must be quick.
"""

from __future__ import annotations

from omni_discovery.clients.hub import OmniCoordClientForHub
from omni_discovery.clients.stage import OmniCoordClientForStage

__all__ = ["OmniCoordClientForHub", "OmniCoordClientForStage"]
