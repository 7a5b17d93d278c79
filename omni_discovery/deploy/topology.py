"""The plan of one host, made and checked before anything starts: replicas, devices, ports, connectors. Pure.

A tensor or pipeline parallel replica is a group: it takes one device for each of its ranks and shares none with other
groups of the stage. Replicas of one device each may share it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from omni_discovery.deploy.document import DeployConfig, StageConfig
from omni_discovery.errors import ConfigError

#: The arguments of vLLM whose product is the number of devices of one replica, the size of its group.
GROUP_ARGS: Final = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")
#: Ports on which vLLM's KV connectors answer; every replica of a host needs its own.
KV_PORTS: Final = ("VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_MOONCAKE_BOOTSTRAP_PORT")

_DEVICE: Final = re.compile(r"[0-9]+|(GPU|MIG)-[0-9A-Za-z/-]+")


def device_names(stage: StageConfig) -> tuple[str, ...]:
    """Return the devices that a stage names, none for the CPU. Raise ConfigError for a name that is no device."""
    names = tuple(name.strip() for name in stage.runtime.devices.split(",") if name.strip())
    for name in names:
        if not _DEVICE.fullmatch(name):
            raise ConfigError(
                f"stage {stage.stage_id}: runtime.devices names {name!r}, which is no device; right would be what "
                "CUDA_VISIBLE_DEVICES takes: indices such as '0,1', or UUIDs such as 'GPU-8932f937-...'"
            )
    return names


def group_size(stage: StageConfig) -> int:
    """Return the number of devices of one replica of a stage. Raise ConfigError for a wrong parallel size."""
    size = 1
    for name in GROUP_ARGS:
        value = stage.engine_args.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"stage {stage.stage_id}: engine_args.{name} is {value!r}; right would be 1 or more")
        size *= value
    return size


def devices_of(stage: StageConfig, count: int, ordinal: int) -> tuple[str, ...]:
    """Return the devices of local replica ``ordinal`` (from 0) of ``count``; empty for the CPU.

    Devices are given out evenly in the order of the document. Raise ConfigError if their number does not allow that.
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
    if size == 1 and count % len(names) == 0:
        return (names[ordinal % len(names)],)
    if size == 1:
        raise ConfigError(
            f"stage {stage.stage_id}: {len(names)} devices ({_listed(names)}) can't be shared out evenly to {count} "
            "replicas; right would be a multiple or a divisor of that number"
        )
    raise ConfigError(
        f"stage {stage.stage_id}: {count} replicas of {size} devices each (its parallel sizes in engine_args) need "
        f"{count * size} devices; runtime.devices has {len(names)} ({_listed(names)})"
    )


def _listed(names: tuple[str, ...]) -> str:
    return ",".join(names)


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """One replica to start here. ``ordinal`` counts its stage's replicas on this host; etcd decides the replica id."""

    stage_id: int
    ordinal: int
    #: Devices by their names in the document; none for the CPU.
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
    return Topology(replicas, edges, (*filter(None, warnings), *_shared(replicas)))


def _idle(stage: StageConfig, count: int) -> str:
    """Return a warning about devices that the stage's replicas will not use; empty if there are none."""
    assigned, used = len(devices_of(stage, count, 0)), group_size(stage)
    if used >= assigned or (used == 1 and stage.engine != "vllm"):
        return ""
    return (
        f"stage {stage.stage_id}: a replica gets {assigned} devices, and its parallel sizes in engine_args use {used}; "
        "run more replicas, set tensor_parallel_size, or name fewer devices"
    )


def _shared(replicas: Sequence[ReplicaPlan]) -> list[str]:
    users: dict[str, Counter[int]] = {}
    for replica in replicas:
        for device in replica.devices:
            users.setdefault(device, Counter())[replica.stage_id] += 1
    return [
        f"device {device} is shared by {_users_text(stages)}: its memory must do for all of them"
        for device, stages in users.items()
        if stages.total() > 1
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
