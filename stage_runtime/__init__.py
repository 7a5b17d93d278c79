"""The replicas of a stage: processes, supervisor, engines and connectors.

What packages that add an engine or a connector build on is exported here lazily.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_discovery.lazy import lazy_exports

if TYPE_CHECKING:
    from stage_runtime.connectors.base import OmniConnectorBase
    from stage_runtime.engines.base import Engine, EngineOutput, StageRequest

__all__ = ["Engine", "EngineOutput", "OmniConnectorBase", "StageRequest"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "Engine": "stage_runtime.engines.base",
            "EngineOutput": "stage_runtime.engines.base",
            "OmniConnectorBase": "stage_runtime.connectors.base",
            "StageRequest": "stage_runtime.engines.base",
        },
    )
