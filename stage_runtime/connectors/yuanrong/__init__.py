"""Yuanrong's datasystem and transfer engine as connectors.

Exports lazily the name that ``stage_runtime.connectors.yuanrong`` held while it was a module; removed in 0.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_discovery.lazy import lazy_exports

if TYPE_CHECKING:
    from stage_runtime.connectors.yuanrong.store import YuanrongConnector

__all__ = ["YuanrongConnector"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, {"YuanrongConnector": "stage_runtime.connectors.yuanrong.store"})
