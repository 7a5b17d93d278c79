"""Connectors: tensors from stage to stage, never through the hub."""

from stage_runtime.connectors.base import OmniConnectorBase
from stage_runtime.connectors.config import ConnectorSpec, OmniTransferConfig, load_omni_transfer_config
from stage_runtime.connectors.factory import OmniConnectorFactory
from stage_runtime.connectors.shm import SharedMemoryConnector

__all__ = [
    "ConnectorSpec",
    "OmniConnectorBase",
    "OmniConnectorFactory",
    "OmniTransferConfig",
    "SharedMemoryConnector",
    "load_omni_transfer_config",
]
