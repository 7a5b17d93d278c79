"""What the machine gives to a supervisor: which accelerators it has."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ConfigError
from stage_runtime.devices import Machine, Platform

#: What may be an accelerator of a kind that is not counted here.
_OTHERS: Final = (
    *("dev/dxg", "dev/nvidiactl", "dev/nvgpu", "dev/nvhost-*"),
    *("dev/accel*", "dev/dri/renderD*", "dev/vfio/[0-9]*"),
)
#: NVIDIA, AMD's graphics, Huawei.
_CARD_VENDORS: Final = frozenset({0x10DE, 0x1002, 0x19E5})


def find_machine(root: Path = Path("/")) -> Machine:
    """The accelerators that the kernel shows, found without loading any driver."""
    counts = {
        Platform.CUDA: len([path for path in root.glob("dev/nvidia*") if path.name.removeprefix("nvidia").isdigit()]),
        Platform.ROCM: len([path for path in root.glob("sys/class/kfd/kfd/topology/nodes/*/gpu_id") if _number(path)]),
        Platform.ASCEND: len([path for path in root.glob("dev/davinci*") if path.name[len("davinci") :].isdigit()]),
    }
    others = any(True for pattern in _OTHERS for _ in root.glob(pattern)) or any(
        # Drivers make their device nodes at the first use: a card may be there without one.
        _number(path) in _CARD_VENDORS
        for path in root.glob("sys/bus/pci/devices/*/vendor")
    )
    return Machine({platform: count for platform, count in counts.items() if count}, others)


def _number(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii"), 0)
    except (OSError, ValueError):
        return 0


def check_devices_are_seen(stage: StageConfig, device: str) -> None:
    """Raise ConfigError if a replica was given devices, but its engine, which is loaded by now, found none to work on.

    ``device`` is what the replica's record says.
    """
    torch = sys.modules.get("torch")
    if stage.engine == "echo" or device == "cpu" or torch is None:
        return
    seen = getattr(torch, "accelerator", torch.cuda).is_available()
    if not seen:
        raise ConfigError(
            f"stage {stage.stage_id}: torch {torch.__version__} sees nothing of {device}: "
            "check the driver, that this torch is built for it, and runtime.devices (empty for the CPU)"
        )
