"""The accelerators of this machine, and the visible-devices variables that give some of them to a replica.

Indices in the deploy document count the devices visible to the supervisor: under ``CUDA_VISIBLE_DEVICES=4,5``, as a
scheduler sets it, ``devices: "0,1"`` are the machine's 4 and 5.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from omni_discovery.deploy.document import StageConfig
from omni_discovery.deploy.topology import CPU
from omni_discovery.errors import ConfigError

logger = logging.getLogger(__name__)


class Platform(StrEnum):
    """The vendor of a device; the value is torch's name for it, which the record shows."""

    CUDA = "cuda"
    ROCM = "rocm"
    ASCEND = "npu"


#: The variables that limit a process to some devices.
VARIABLES: Final = {
    Platform.CUDA: "CUDA_VISIBLE_DEVICES",
    Platform.ROCM: "HIP_VISIBLE_DEVICES",
    Platform.ASCEND: "ASCEND_RT_VISIBLE_DEVICES",
}
#: Not among them: HIP's indices count within the devices that it leaves.
_OF_HIP: Final = "ROCR_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Machine:
    """The number of devices by platform. ``has_others``: there are device files that may be accelerators, too."""

    counts: Mapping[Platform, int]
    has_others: bool = False


#: A machine that was not examined; every index may exist.
UNKNOWN: Final = Machine({}, has_others=True)


class NoSuchDeviceError(ConfigError):
    """An index in the deploy document that is known not to exist here."""


def resolve(stage_id: int, names: tuple[str, ...], environment: Mapping[str, str], machine: Machine) -> tuple[str, ...]:
    """Translate the document's device names to the machine's. Raise NoSuchDeviceError."""
    if variable := _limiting(environment):
        return tuple(_shown(stage_id, name, variable, environment[variable]) for name in names)
    for name in names:
        _check_is_there(stage_id, name, machine)
    return names


def visible_devices(environment: Mapping[str, str], machine: Machine) -> tuple[str, ...] | None:
    """The devices that a process with this environment is shown, by the machine's names; None if nobody can tell."""
    if variable := _limiting(environment):
        return tuple(_listed(environment[variable]))
    if _OF_HIP in environment:
        return tuple(str(index) for index, _ in enumerate(_listed(environment[_OF_HIP])))
    if len(machine.counts) == 1:
        return tuple(str(index) for index in range(*machine.counts.values()))
    return None if machine.counts or machine.has_others else ()


def what_shows(environment: Mapping[str, str]) -> str:
    """What ``visible_devices`` goes by, as the beginning of a sentence that ends with their number."""
    variable = _limiting(environment) or (_OF_HIP if _OF_HIP in environment else "")
    return f"{variable}={environment[variable]!r} shows" if variable else "this machine has"


def _limiting(environment: Mapping[str, str]) -> str:
    """The variable that limits this process to some devices; empty if none does."""
    return next((variable for variable in VARIABLES.values() if variable in environment), "")


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
    shown = _listed(value)
    if not name.isdigit():
        return name
    if int(name) < len(shown):
        return shown[int(name)]
    raise NoSuchDeviceError(
        f"stage {stage_id}: there is no device {name} here: {variable}={value!r} shows {_count(len(shown))}, counted "
        "from 0; correct runtime.devices or the variable"
    )


def _listed(value: str) -> list[str]:
    """The devices in the value of a variable, as the drivers read it: what can't be a device ends the list."""
    shown: list[str] = []
    for each in value.split(","):
        if not each.strip() or each.strip().startswith("-"):
            break
        shown.append(each.strip())
    return shown


def _check_is_there(stage_id: int, name: str, machine: Machine) -> None:
    if not name.isdigit() or (not machine.counts and machine.has_others):
        return
    count = max(machine.counts.values(), default=0)
    if int(name) >= count:
        on_cpus = f'(here alone: --stage-overrides \'{{"{stage_id}": {{"devices": "cpu"}}}}\')'
        advice = "correct runtime.devices" if count else f"set runtime.devices to cpu {on_cpus}, or leave it out"
        where = f"this machine has {_count(count)}" + (", counted from 0" if count else "")
        raise NoSuchDeviceError(f"stage {stage_id}: there is no device {name} here: {where}; {advice}")


def _count(number: int) -> str:
    return {0: "none", 1: "1 device"}.get(number, f"{number} devices")


#: Device files that may be accelerators of a kind that is not counted here.
_OTHERS: Final = (
    *("dev/dxg", "dev/nvidiactl", "dev/nvgpu", "dev/nvhost-*"),
    *("dev/accel*", "dev/dri/renderD*", "dev/vfio/[0-9]*"),
)
#: How long nvidia-smi may take, which starts the driver if nothing has used it yet.
_ANSWER_S: Final = 20.0
#: NVIDIA, AMD's graphics, Huawei.
_CARD_VENDORS: Final = frozenset({0x10DE, 0x1002, 0x19E5})


def find_machine(root: Path = Path("/"), ask: Callable[[], int] | None = None) -> Machine:
    """Count the accelerators in /dev and /sys, without loading a driver.

    Where the kernel shows only that there may be some, ``ask`` says how many of NVIDIA's there are (default: what
    nvidia-smi lists).
    """
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
    if others and not any(counts.values()):
        counts[Platform.CUDA] = (ask or _ask_nvidia_smi)()
    return Machine({platform: count for platform, count in counts.items() if count}, others)


def _ask_nvidia_smi() -> int:
    """How many devices nvidia-smi lists; 0 without one that answers."""
    if (command := shutil.which("nvidia-smi")) is None:
        return 0
    try:
        asked = [command, "--list-gpus"]
        ended = subprocess.run(asked, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in ended.stdout.splitlines()) if ended.returncode == 0 else 0


def _number(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii"), 0)
    except (OSError, ValueError):
        return 0


def runs_on_cpu(stage: StageConfig) -> bool:
    """Whether the stage's engine is told to use the CPU, whatever its replica is shown."""
    return str(stage.engine_args.get("device", "")).startswith(CPU)


def device_in_use(stage: StageConfig, device: str) -> str:
    """The device that a replica uses whose engine has loaded: ``device``, as ``device_text`` has it, or cpu.

    Raise ConfigError if torch sees nothing of devices that the deploy document names; of others, a warning is logged.
    """
    if runs_on_cpu(stage):
        return CPU
    torch = sys.modules.get("torch")
    if stage.engine == "echo" or device == CPU or torch is None:
        return device
    if getattr(torch, "accelerator", torch.cuda).is_available():
        return device
    unseen = f"torch {torch.__version__} sees nothing of {device}"
    if stage.runtime.devices:
        raise ConfigError(
            f"stage {stage.stage_id}: {unseen}: "
            f"check the driver, that this torch is built for it, and runtime.devices ({CPU} for the CPU)"
        )
    logger.warning("replica.on_cpu stage=%d: %s: is it built for this driver?", stage.stage_id, unseen)
    return CPU
