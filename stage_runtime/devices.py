"""Which devices a replica is shown, and under which names. Pure.

Indices in the deploy document count what the supervisor itself was shown: under ``CUDA_VISIBLE_DEVICES=4,5``, as a
scheduler sets it, ``devices: "0,1"`` are the machine's 4 and 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from omni_discovery.errors import ConfigError


class Platform(StrEnum):
    """Whose devices they are; the value is what the record calls them, as torch does."""

    CUDA = "cuda"
    ROCM = "rocm"
    ASCEND = "npu"


#: What narrows a process to some devices. ROCR_VISIBLE_DEVICES is none of them: HIP counts within what that one shows.
VARIABLES: Final = {
    Platform.CUDA: "CUDA_VISIBLE_DEVICES",
    Platform.ROCM: "HIP_VISIBLE_DEVICES",
    Platform.ASCEND: "ASCEND_RT_VISIBLE_DEVICES",
}


@dataclass(frozen=True, slots=True)
class Machine:
    """How many devices of each platform there are. ``has_others``: something is there that may be one, too."""

    counts: Mapping[Platform, int]
    has_others: bool = False


#: Nobody has looked; every index may be there.
UNKNOWN: Final = Machine({}, has_others=True)


def resolve(stage_id: int, names: tuple[str, ...], environment: Mapping[str, str], machine: Machine) -> tuple[str, ...]:
    """The devices of a document by the names that the machine has for them.

    Raise ConfigError for an index that is not there, where that can be known.
    """
    for variable in VARIABLES.values():
        if variable in environment:
            return tuple(_shown(stage_id, name, variable, environment[variable]) for name in names)
    for name in names:
        _check_is_there(stage_id, name, machine)
    return names


def environment_of(names: tuple[str, ...], environment: Mapping[str, str], machine: Machine) -> dict[str, str]:
    """What narrows a replica to devices by their machine's names; none of them leaves it the CPU."""
    listed = ",".join(names)
    return {
        variable: listed
        for platform, variable in VARIABLES.items()
        if platform is Platform.CUDA or platform in machine.counts or variable in environment
    }


def device_text(environment: Mapping[str, str]) -> str:
    """How a replica's record names its devices: ``cuda:0,1``, ``npu:0`` or ``cpu``."""
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
