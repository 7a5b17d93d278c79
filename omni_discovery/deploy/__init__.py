"""The pipeline document (YAML): read, checked, compared. Pure but for load.py.

Exports lazily what ``omni_discovery.deploy`` held while it was a module; import ``omni_discovery.deploy.document``
instead. Removed in 0.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_discovery.lazy import lazy_exports

if TYPE_CHECKING:
    from omni_discovery.deploy.document import (
        ConnectorConfig,
        DeployConfig,
        EdgeConfig,
        RayConfig,
        RuntimeConfig,
        StageConfig,
        decode_deploy,
        encode_deploy,
        parse_deploy,
        read_deploy,
    )

__all__ = [
    "ConnectorConfig",
    "DeployConfig",
    "EdgeConfig",
    "RayConfig",
    "RuntimeConfig",
    "StageConfig",
    "decode_deploy",
    "encode_deploy",
    "parse_deploy",
    "read_deploy",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, dict.fromkeys(__all__, "omni_discovery.deploy.document"))
