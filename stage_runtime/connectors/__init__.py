"""Connectors: tensors from stage to stage, never through the hub."""

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
from stage_runtime.connectors.shm.connector import SharedMemoryConnector
from stage_runtime.connectors.tcp.connector import TcpConnector
from stage_runtime.connectors.yuanrong.store import YuanrongConnector
from stage_runtime.connectors.yuanrong.transfer import YuanrongTransferEngineConnector

__all__ = [
    "AutoConnector",
    "ConnectorSpec",
    "EdgeFullError",
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
