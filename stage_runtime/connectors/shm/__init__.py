"""SharedMemoryConnector: hand-offs within one host.

Exports lazily the name that ``stage_runtime.connectors.shm`` held while it was a module; removed in 0.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_discovery.lazy import lazy_exports

if TYPE_CHECKING:
    from stage_runtime.connectors.shm.connector import SharedMemoryConnector

__all__ = ["SharedMemoryConnector"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, {"SharedMemoryConnector": "stage_runtime.connectors.shm.connector"})
