"""The hub: orchestrator, stage pools and the HTTP APIs. Its public names are exported lazily."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_discovery.lazy import lazy_exports

if TYPE_CHECKING:
    from hub.async_omni import AsyncOmni
    from hub.joining import join
    from hub.omni import Omni
    from hub.orchestrator.orchestrator import Orchestrator
    from hub.pool.stage_pool import StagePool

__all__ = ["AsyncOmni", "Omni", "Orchestrator", "StagePool", "join"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "AsyncOmni": "hub.async_omni",
            "Omni": "hub.omni",
            "Orchestrator": "hub.orchestrator.orchestrator",
            "StagePool": "hub.pool.stage_pool",
            "join": "hub.joining",
        },
    )
