"""The one task that owns all requests and pools.

Exports lazily the name that ``hub.orchestrator`` held while it was a module; removed in 0.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_discovery.lazy import lazy_exports

if TYPE_CHECKING:
    from hub.orchestrator.orchestrator import Orchestrator

__all__ = ["Orchestrator"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, {"Orchestrator": "hub.orchestrator.orchestrator"})
