"""The peer's connector for shared memory, loaded from its wheel as it was published.

Only its connector, serialiser and reading and writing of segments run; what surrounds them is empty stand-ins.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Final

_PACKAGES: Final = (
    "vllm_omni",
    "vllm_omni.config",
    "vllm_omni.entrypoints",
    "vllm_omni.distributed",
    "vllm_omni.distributed.omni_connectors",
    "vllm_omni.distributed.omni_connectors.connectors",
    "vllm_omni.distributed.omni_connectors.utils",
    "vllm",
)
#: Modules of which only names are wanted.
_NAMES: Final = {
    "vllm.outputs": ("CompletionOutput", "RequestOutput"),
    "vllm_omni.outputs": ("OmniRequestOutput",),
    "vllm_omni.config.yaml_util": ("to_dict",),
    "vllm_omni.platforms": ("current_omni_platform",),
}


def load(wheel: str) -> Any:
    """Its SharedMemoryConnector, built. Raise FileNotFoundError without the wheel."""
    if not Path(wheel).is_file():
        raise FileNotFoundError(wheel)
    for name in _PACKAGES:
        stand_in = ModuleType(name)
        stand_in.__path__ = [f"{wheel}/{name.replace('.', '/')}"]
        sys.modules.setdefault(name, stand_in)
    for name, wanted in _NAMES.items():
        stand_in = ModuleType(name)
        stand_in.__dict__.update({one: type(one, (), {}) for one in wanted})
        sys.modules.setdefault(name, stand_in)
    module = importlib.import_module("vllm_omni.distributed.omni_connectors.connectors.shm_connector")
    return module.SharedMemoryConnector({"stage_id": 0, "shm_threshold_bytes": 65536})
