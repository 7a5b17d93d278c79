"""TcpConnector: hand-offs between hosts, with a token for each transfer.

Exports lazily the name that ``stage_runtime.connectors.tcp`` held while it was a module; removed in 0.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_discovery.lazy import lazy_exports

if TYPE_CHECKING:
    from stage_runtime.connectors.tcp.connector import TcpConnector

__all__ = ["TcpConnector"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, {"TcpConnector": "stage_runtime.connectors.tcp.connector"})
