"""Connectors: tensors from stage to stage, never through the hub. Every public name is exported lazily."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_discovery.lazy import lazy_exports

if TYPE_CHECKING:
    from stage_runtime.connectors.auto import AutoConnector
    from stage_runtime.connectors.base import OmniConnectorBase
    from stage_runtime.connectors.errors import (
        EdgeFullError,
        TransferCancelledError,
        TransferError,
        TransferTimeoutError,
    )
    from stage_runtime.connectors.factory import (
        ConnectorSpec,
        OmniConnectorFactory,
        OmniTransferConfig,
        load_omni_transfer_config,
    )
    from stage_runtime.connectors.mooncake.store import MooncakeStoreConnector
    from stage_runtime.connectors.mooncake.store import MooncakeStoreConnector as MooncakeConnector
    from stage_runtime.connectors.mooncake.transfer import MooncakeTransferEngineConnector
    from stage_runtime.connectors.shm.connector import SharedMemoryConnector
    from stage_runtime.connectors.tcp.connector import TcpConnector
    from stage_runtime.connectors.yuanrong.store import YuanrongConnector
    from stage_runtime.connectors.yuanrong.transfer import YuanrongTransferEngineConnector

__all__ = [
    "AutoConnector",
    "ConnectorSpec",
    "EdgeFullError",
    "MooncakeConnector",
    "MooncakeStoreConnector",
    "MooncakeTransferEngineConnector",
    "OmniConnectorBase",
    "OmniConnectorFactory",
    "OmniTransferConfig",
    "SharedMemoryConnector",
    "TcpConnector",
    "TransferCancelledError",
    "TransferError",
    "TransferTimeoutError",
    "YuanrongConnector",
    "YuanrongTransferEngineConnector",
    "load_omni_transfer_config",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "AutoConnector": "stage_runtime.connectors.auto",
            "ConnectorSpec": "stage_runtime.connectors.factory",
            "EdgeFullError": "stage_runtime.connectors.errors",
            # The old name of MooncakeStoreConnector.
            "MooncakeConnector": "stage_runtime.connectors.mooncake.store:MooncakeStoreConnector",
            "MooncakeStoreConnector": "stage_runtime.connectors.mooncake.store",
            "MooncakeTransferEngineConnector": "stage_runtime.connectors.mooncake.transfer",
            "OmniConnectorBase": "stage_runtime.connectors.base",
            "OmniConnectorFactory": "stage_runtime.connectors.factory",
            "OmniTransferConfig": "stage_runtime.connectors.factory",
            "SharedMemoryConnector": "stage_runtime.connectors.shm.connector",
            "TcpConnector": "stage_runtime.connectors.tcp.connector",
            "TransferCancelledError": "stage_runtime.connectors.errors",
            "TransferError": "stage_runtime.connectors.errors",
            "TransferTimeoutError": "stage_runtime.connectors.errors",
            "YuanrongConnector": "stage_runtime.connectors.yuanrong.store",
            "YuanrongTransferEngineConnector": "stage_runtime.connectors.yuanrong.transfer",
            "load_omni_transfer_config": "stage_runtime.connectors.factory",
        },
    )
