"""What is to run on one host, laid out and checked before anything starts: replicas, devices, ports, connectors. Pure.

A tensor or pipeline parallel replica is a group: it takes one device for each of its ranks, and no other group of the
stage gets any of them. Replicas of one device each may share it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from omni_discovery.deploy.document import DeployConfig, StageConfig
from omni_discovery.errors import ConfigError

#: What makes one replica of vLLM span several devices: their product is the size of its group.
GROUP_ARGS: Final = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")
#: Where vLLM's KV connectors are asked for what they hold; every replica of a host needs its own.
KV_PORTS: Final = ("VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_MOONCAKE_BOOTSTRAP_PORT")

_DEVICE: Final = re.compile(r"[0-9]+|(GPU|MIG)-[0-9A-Za-z/-]+")


def device_names(stage: StageConfig) -> tuple[str, ...]:
    """The devices that a stage names; none means the CPU. Raise ConfigError for what can't be one."""
    names = tuple(name.strip() for name in stage.runtime.devices.split(",") if name.strip())
    for name in names:
        if not _DEVICE.fullmatch(name):
            raise ConfigError(
                f"stage {stage.stage_id}: runtime.devices names {name!r}, which is no device; right would be what "
                "CUDA_VISIBLE_DEVICES takes: indices such as '0,1', or UUIDs such as 'GPU-8932f937-...'"
            )
    return names


def group_size(stage: StageConfig) -> int:
    """How many devices one replica of a stage spans. Raise ConfigError for a size that is none."""
    size = 1
    for name in GROUP_ARGS:
        value = stage.engine_args.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"stage {stage.stage_id}: engine_args.{name} is {value!r}; right would be 1 or more")
        size *= value
    return size


def devices_of(stage: StageConfig, count: int, ordinal: int) -> tuple[str, ...]:
    """The devices of local replica ``ordinal`` (from 0) of ``count``; empty means the CPU.

    Every device is given out, in the order of the document, if that comes out even. Raise ConfigError if not.
    """
    names, size = device_names(stage), group_size(stage)
    if not names:
        return ()
    if len(set(names)) < len(names) and (size > 1 or len(names) > count):
        raise ConfigError(
            f"stage {stage.stage_id}: runtime.devices gives a group of several a device twice: {_told(names)}"
        )
    if len(names) % count == 0 and len(names) // count >= size:
        share = len(names) // count
        return names[ordinal * share : (ordinal + 1) * share]
    if size == 1 and count % len(names) == 0:
        return (names[ordinal % len(names)],)
    if size == 1:
        raise ConfigError(
            f"stage {stage.stage_id}: {len(names)} devices ({_told(names)}) can't be shared out evenly to {count} "
            "replicas; right would be a multiple or a divisor of that number"
        )
    raise ConfigError(
        f"stage {stage.stage_id}: {count} replicas of {size} devices each (its parallel sizes in engine_args) need "
        f"{count * size} devices; runtime.devices has {len(names)} ({_told(names)})"
    )


def _told(names: tuple[str, ...]) -> str:
    return ",".join(names)


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """One replica to start here. ``ordinal`` counts those of its stage on this host; the registry gives the id."""

    stage_id: int
    ordinal: int
    #: As the document names them; none means the CPU.
    devices: tuple[str, ...]
    #: What it listens on; each port is one that is free when it starts.
    ports: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EdgePlan:
    """How hand-offs go from one stage to the next."""

    from_stage: int
    to_stage: int
    connector: str
    #: What the connector is told: its ``extra``, with the edge's bounds.
    settings: Mapping[str, Any]
    #: Whether the next stage begins on the first piece.
    in_pieces: bool


@dataclass(frozen=True, slots=True)
class Topology:
    """What a deploy document and the flags of one host come to."""

    replicas: tuple[ReplicaPlan, ...]
    edges: tuple[EdgePlan, ...]
    #: What is allowed and may be a slip, for a person to read.
    told: tuple[str, ...]


def plan(deploy: DeployConfig, local: Sequence[tuple[StageConfig, int]], *, on_this_machine: bool = True) -> Topology:
    """Lay out ``local``: the stages that run here, as they run here, each with the number of its replicas.

    Where replicas are placed by somebody else, ``on_this_machine`` false, devices are theirs to give. Raise ConfigError
    if it can't be done.
    """
    replicas = tuple(
        ReplicaPlan(
            stage.stage_id, ordinal, devices_of(stage, count, ordinal) if on_this_machine else (), _ports(stage)
        )
        for stage, count in local
        for ordinal in range(count)
    )
    told = [_idle(stage, count) for stage, count in local if on_this_machine]
    edges = tuple(
        _edge(deploy, before, stage.stage_id) for stage in deploy.stages for before in deploy.inputs_of(stage.stage_id)
    )
    return Topology(replicas, edges, (*filter(None, told), *_shared(replicas)))


def _idle(stage: StageConfig, count: int) -> str:
    """What to say of devices that nobody will use; empty if there are none."""
    given, used = len(devices_of(stage, count, 0)), group_size(stage)
    if used >= given or (used == 1 and stage.engine != "vllm"):
        return ""
    return (
        f"stage {stage.stage_id}: a replica gets {given} devices, and its parallel sizes in engine_args use {used}; "
        "run more replicas, set tensor_parallel_size, or name fewer devices"
    )


def _shared(replicas: Sequence[ReplicaPlan]) -> list[str]:
    users: dict[str, list[str]] = {}
    for replica in replicas:
        for device in replica.devices:
            users.setdefault(device, []).append(f"stage {replica.stage_id} #{replica.ordinal}")
    return [
        f"device {device} is shared by {', '.join(names)}: its memory must do for all of them"
        for device, names in users.items()
        if len(names) > 1
    ]


def _ports(stage: StageConfig) -> tuple[str, ...]:
    of_engine = () if stage.engine == "echo" else ("MASTER_PORT",)
    of_transfer = KV_PORTS if stage.engine_args.get("kv_transfer_config") else ()
    return ("input", "output", *of_engine, *of_transfer)


def _edge(deploy: DeployConfig, before: int, after: int) -> EdgePlan:
    connector = deploy.connector_of(before, after)
    return EdgePlan(before, after, connector.name, connector.extra, deploy.async_chunk_of(before, after))
