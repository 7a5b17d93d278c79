"""The accelerators of this machine, and the visible-devices variables that give some of them to a replica.

Indices in the deploy document count the devices visible to the supervisor: under ``CUDA_VISIBLE_DEVICES=4,5``, as a
scheduler sets it, ``devices: "0,1"`` are the machine's 4 and 5.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ConfigError


class Platform(StrEnum):
    """The vendor of a device; the value is torch's name for it, which the record shows."""

    CUDA = "cuda"
    ROCM = "rocm"
    ASCEND = "npu"


#: The variables that limit a process to some devices. ROCR_VISIBLE_DEVICES is not among them: HIP's indices count
#: within the devices that it leaves.
VARIABLES: Final = {
    Platform.CUDA: "CUDA_VISIBLE_DEVICES",
    Platform.ROCM: "HIP_VISIBLE_DEVICES",
    Platform.ASCEND: "ASCEND_RT_VISIBLE_DEVICES",
}


@dataclass(frozen=True, slots=True)
class Machine:
    """The number of devices by platform. ``has_others``: there are device files that may be accelerators, too."""

    counts: Mapping[Platform, int]
    has_others: bool = False


#: A machine that was not examined; every index may exist.
UNKNOWN: Final = Machine({}, has_others=True)


def resolve(stage_id: int, names: tuple[str, ...], environment: Mapping[str, str], machine: Machine) -> tuple[str, ...]:
    """Translate the document's device names to the machine's. Raise ConfigError for an index known not to exist."""
    for variable in VARIABLES.values():
        if variable in environment:
            return tuple(_shown(stage_id, name, variable, environment[variable]) for name in names)
    for name in names:
        _check_is_there(stage_id, name, machine)
    return names


def environment_of(names: tuple[str, ...], environment: Mapping[str, str], machine: Machine) -> dict[str, str]:
    """The variables that limit a replica to the devices ``names`` (the machine's names); to the CPU if it is empty."""
    listed = ",".join(names)
    return {
        variable: listed
        for platform, variable in VARIABLES.items()
        if platform is Platform.CUDA or platform in machine.counts or variable in environment
    }


def device_text(environment: Mapping[str, str]) -> str:
    """The devices as the replica's record shows them: ``cuda:0,1``, ``npu:0`` or ``cpu``."""
    if listed := environment.get(VARIABLES[Platform.ASCEND]):
        return f"{Platform.ASCEND}:{listed}"
    # torch calls AMD's devices cuda, too.
    listed = environment.get(VARIABLES[Platform.CUDA])
    return f"{Platform.CUDA}:{listed}" if listed else "cpu"


def _shown(stage_id: int, name: str, variable: str, value: str) -> str:
    shown: list[str] = []
    for each in value.split(","):
        # As the drivers read it: what can't be a device ends the list.
        if not each.strip() or each.strip().startswith("-"):
            break
        shown.append(each.strip())
    if not name.isdigit():
        return name
    if int(name) < len(shown):
        return shown[int(name)]
    raise ConfigError(
        f"stage {stage_id}: there is no device {name} here: {variable}={value!r} shows {_count(len(shown))}, counted "
        "from 0; correct runtime.devices or the variable"
    )


def _check_is_there(stage_id: int, name: str, machine: Machine) -> None:
    if not name.isdigit() or (not machine.counts and machine.has_others):
        return
    count = max(machine.counts.values(), default=0)
    if int(name) >= count:
        advice = "correct runtime.devices" if count else "leave runtime.devices empty for the CPU"
        where = f"this machine has {_count(count)}" + (", counted from 0" if count else "")
        raise ConfigError(f"stage {stage_id}: there is no device {name} here: {where}; {advice}")


def _count(number: int) -> str:
    return {0: "none", 1: "1 device"}.get(number, f"{number} devices")


#: Device files that may be accelerators of a kind that is not counted here.
_OTHERS: Final = (
    *("dev/dxg", "dev/nvidiactl", "dev/nvgpu", "dev/nvhost-*"),
    *("dev/accel*", "dev/dri/renderD*", "dev/vfio/[0-9]*"),
)
#: NVIDIA, AMD's graphics, Huawei.
_CARD_VENDORS: Final = frozenset({0x10DE, 0x1002, 0x19E5})


def find_machine(root: Path = Path("/")) -> Machine:
    """Count the accelerators in /dev and /sys, without loading a driver."""
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
    """Raise ConfigError if a replica has devices and torch, which its engine has imported by now, sees none of them.

    ``device`` is the text of ``device_text``.
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
