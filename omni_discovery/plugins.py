"""Plugins of other installed packages: the entry-point groups that are read, and the built-in names beside them.

The names are here, and not with the classes that they stand for, because hubs check a deploy document without importing
an engine or a connector.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Final

#: Classes, or functions, that return a sub-command of ``omni``.
COMMAND_GROUPS: Final = ("omni_discovery.commands",)
#: What returns a LoadBalancer.
POLICY_GROUPS: Final = ("omni_discovery.policies",)
#: What makes an engine of a StageConfig. The second group is the name before 0.2, read until 0.3.
ENGINE_GROUPS: Final = ("stage_runtime.engines", "omni_discovery.engines")
#: What makes a connector of its ``extra``.
CONNECTOR_GROUPS: Final = ("stage_runtime.connectors",)

#: The engines that every replica can name; ``stage_runtime.engines.base`` knows where they are.
BUILT_IN_ENGINES: Final = ("diffusion", "echo", "torch", "vllm")
#: The connectors that every replica can name; each is a class of that name in ``stage_runtime.connectors``.
BUILT_IN_CONNECTORS: Final = (
    "AutoConnector",
    "MooncakeStoreConnector",
    "MooncakeTransferEngineConnector",
    "SharedMemoryConnector",
    "TcpConnector",
    "YuanrongConnector",
    "YuanrongTransferEngineConnector",
)
#: Old names of connectors, with the new ones.
CONNECTOR_ALIASES: Final = {"MooncakeConnector": "MooncakeStoreConnector"}


def find_plugins(groups: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Return the entry points of these groups by name, not loaded yet; of two of one name, that of the first group."""
    return {point.name: point for group in reversed(groups) for point in entry_points(group=group)}
