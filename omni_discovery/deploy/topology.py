"""The plan of one host, made and checked before anything starts: replicas, devices, ports, connectors. Pure.

A tensor or pipeline parallel replica is a group: it takes one device for each of its ranks. Replicas of a stage share
devices only where its ``runtime.share_devices`` says so.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from omni_discovery.deploy.document import DeployConfig, StageConfig
from omni_discovery.deploy.engine_args import group_size
from omni_discovery.errors import ConfigError

#: Ports on which vLLM's KV connectors answer; every replica of a host needs its own.
MOONCAKE_PORT: Final = "VLLM_MOONCAKE_BOOTSTRAP_PORT"
KV_PORTS: Final = ("VLLM_NIXL_SIDE_CHANNEL_PORT", MOONCAKE_PORT)

_DEVICE: Final = re.compile(r"[0-9]+|(GPU|MIG)-[0-9A-Za-z/-]+")


#: What ``runtime.devices`` says to run a stage on the CPU, whatever its supervisor was shown.
CPU: Final = "cpu"
_SHARE: Final = "runtime: {share_devices: true}"


def names_cpu(stage: StageConfig) -> bool:
    """Whether a stage is to run on the CPU."""
    return stage.runtime.devices.strip().lower() == CPU


def device_names(stage: StageConfig) -> tuple[str, ...]:
    """Return the devices that a stage names, none for the CPU. Raise ConfigError for a name that is no device."""
    if names_cpu(stage):
        return ()
    names = tuple(name.strip() for name in stage.runtime.devices.split(",") if name.strip())
    for name in names:
        if not _DEVICE.fullmatch(name):
            raise ConfigError(
                f"stage {stage.stage_id}: runtime.devices names {name!r}, which is no device; right would be what "
                "CUDA_VISIBLE_DEVICES takes: indices such as '0,1', or UUIDs such as 'GPU-8932f937-...'; or cpu"
            )
    return names


def counts_up(stage: StageConfig, count: int) -> bool:
    """Whether ``runtime.devices`` names the first replica's devices only, and those of the others are counted up."""
    names = len(device_names(stage))
    return count > 1 and stage.runtime.share_devices is not True and names == group_size(stage)


def devices_of(stage: StageConfig, count: int, ordinal: int) -> tuple[str, ...]:
    """Return the devices of local replica ``ordinal`` (from 0) of ``count`` by the document; empty if it names none.

    Devices are given out evenly in the order of the document. Where it names those of one replica, the next replica
    gets those that follow. Raise ConfigError if their number allows neither.
    """
    names, size = device_names(stage), group_size(stage)
    if not names:
        return ()
    if len(set(names)) < len(names) and (size > 1 or len(names) > count):
        raise ConfigError(
            f"stage {stage.stage_id}: runtime.devices gives a group of several a device twice: {_listed(names)}"
        )
    if len(names) % count == 0 and len(names) // count >= size:
        share = len(names) // count
        return names[ordinal * share : (ordinal + 1) * share]
    if stage.runtime.share_devices is True and len(names) >= size:
        return _shared_group(names, size, ordinal)
    if counts_up(stage, count):
        return _counted_up(stage, names, count, ordinal)
    raise ConfigError(_not_enough(stage, names, count, size))


def inherited_devices(
    stage: StageConfig, visible: tuple[str, ...], count: int, ordinal: int, source: str
) -> tuple[str, ...]:
    """Return the share of local replica ``ordinal`` of ``count`` of the devices that are visible to its supervisor.

    For a stage that names none; a single replica gets all. ``source`` says what shows them. Raise ConfigError if they
    are too few.
    """
    size = group_size(stage)
    if not visible or len(visible) >= count * size:
        share = len(visible) // count
        return visible[ordinal * share : (ordinal + 1) * share]
    if stage.runtime.share_devices is True and len(visible) >= size:
        return _shared_group(visible, size, ordinal)
    share_them = f", let them share on purpose ({_SHARE})," if len(visible) >= size else ""
    raise ConfigError(
        f"stage {stage.stage_id}: {_replicas(count, size)} {'needs' if count == 1 else 'need'} {count * size}, and"
        f" {source} {len(visible)}: run fewer replicas here{share_them} or use the CPU (runtime: {{devices: {CPU}}})"
    )


def _shared_group(names: tuple[str, ...], size: int, ordinal: int) -> tuple[str, ...]:
    at = ordinal % (len(names) // size) * size
    return names[at : at + size]


def _counted_up(stage: StageConfig, names: tuple[str, ...], count: int, ordinal: int) -> tuple[str, ...]:
    size = len(names)
    if all(name.isdigit() for name in names):
        groups = [tuple(str(int(name) + size * each) for name in names) for each in range(count)]
        if len({name for group in groups for name in group}) == count * size:
            return groups[ordinal]
    raise ConfigError(
        f"stage {stage.stage_id}: {_listed(names)} can't be counted up for {_replicas(count, size)}: name all"
        f" {count * size} in runtime.devices, or let the replicas share them on purpose ({_SHARE})"
    )


def _not_enough(stage: StageConfig, names: tuple[str, ...], count: int, size: int) -> str:
    if size == 1:
        return (
            f"stage {stage.stage_id}: {len(names)} devices ({_listed(names)}) can't be shared out evenly to {count} "
            f"replicas; right would be {count}, or the first replica's alone; replicas share devices with {_SHARE}"
        )
    return (
        f"stage {stage.stage_id}: {_replicas(count, size)} each (its parallel sizes in engine_args) need "
        f"{count * size} devices; runtime.devices has {len(names)} ({_listed(names)})"
    )


def _replicas(count: int, size: int) -> str:
    return f"{count} {'replica' if count == 1 else 'replicas'} of {size} {'device' if size == 1 else 'devices'}"


def _listed(names: tuple[str, ...]) -> str:
    return ",".join(names)


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """One replica to start here. ``ordinal`` counts its stage's replicas on this host; etcd decides the replica id."""

    stage_id: int
    ordinal: int
    #: Devices by their names in the document; none if it names none.
    devices: tuple[str, ...]
    #: The names of the replica's port variables; each gets a free port when the replica starts.
    ports: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EdgePlan:
    """How hand-offs go from one stage to the next."""

    from_stage: int
    to_stage: int
    connector: str
    #: The connector's ``extra``, with the edge's bounds.
    settings: Mapping[str, Any]
    #: Whether the next stage begins on the first piece.
    in_pieces: bool


@dataclass(frozen=True, slots=True)
class Topology:
    """The result of a deploy document and the flags of one host."""

    replicas: tuple[ReplicaPlan, ...]
    edges: tuple[EdgePlan, ...]
    #: Warnings about settings that are allowed but look like mistakes.
    warnings: tuple[str, ...]


def plan(deploy: DeployConfig, local: Sequence[tuple[StageConfig, int]], *, on_this_machine: bool = True) -> Topology:
    """Plan ``local``, the stages that run here with this host's overrides, each with the number of its replicas.

    With ``on_this_machine`` false a cluster places the replicas and gives them devices. Raise ConfigError if the
    devices do not suffice.
    """
    replicas = tuple(
        ReplicaPlan(
            stage.stage_id, ordinal, devices_of(stage, count, ordinal) if on_this_machine else (), _ports(stage)
        )
        for stage, count in local
        for ordinal in range(count)
    )
    warnings = [_idle(stage, count) for stage, count in local if on_this_machine]
    edges = tuple(
        _edge(deploy, before, stage.stage_id) for stage in deploy.stages for before in deploy.inputs_of(stage.stage_id)
    )
    on_purpose = {stage.stage_id for stage, _ in local if stage.runtime.share_devices is True}
    return Topology(replicas, edges, (*filter(None, warnings), *_shared(replicas, on_purpose)))


def _idle(stage: StageConfig, count: int) -> str:
    """Return a warning about devices that the stage's replicas will not use; empty if there are none."""
    assigned, used = len(devices_of(stage, count, 0)), group_size(stage)
    if used >= assigned or (used == 1 and stage.engine not in ("vllm", "vllm-omni")):
        return ""
    return (
        f"stage {stage.stage_id}: a replica gets {assigned} devices, and its parallel sizes in engine_args use {used}; "
        "run more replicas, set tensor_parallel_size, or name fewer devices"
    )


def _shared(replicas: Sequence[ReplicaPlan], on_purpose: Collection[int]) -> list[str]:
    """Return a warning for each device of several replicas, unless all of them share theirs on purpose."""
    users: dict[str, Counter[int]] = {}
    for replica in replicas:
        for device in replica.devices:
            users.setdefault(device, Counter())[replica.stage_id] += 1
    return [
        f"device {device} is shared by {_users_text(stages)}: its memory must do for all of them"
        for device, stages in users.items()
        if stages.total() > 1 and any(stage_id not in on_purpose for stage_id in stages)
    ]


def _users_text(stages: Counter[int]) -> str:
    return " and ".join(
        f"stage {stage_id}" if count == 1 else f"{count} replicas of stage {stage_id}"
        for stage_id, count in stages.items()
    )


def _ports(stage: StageConfig) -> tuple[str, ...]:
    of_engine = () if stage.engine == "echo" else ("MASTER_PORT",)
    of_transfer = KV_PORTS if stage.engine_args.get("kv_transfer_config") else ()
    return ("input", "output", *of_engine, *of_transfer)


def _edge(deploy: DeployConfig, before: int, after: int) -> EdgePlan:
    connector = deploy.connector_of(before, after)
    return EdgePlan(before, after, connector.name, connector.extra, deploy.async_chunk_of(before, after))
