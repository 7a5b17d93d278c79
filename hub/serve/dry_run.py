"""``omni serve --dry-run``: the plan as text. Reads etcd and writes nothing; the processes that it starts end."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from hub.serve.pipeline_claim import check_pipeline
from hub.serve.plan import StagesOnHost, plan_on_host, stages_on_host
from omni_discovery.commands.flags import RAY
from omni_discovery.commands.output import say
from omni_discovery.commands.registry import child_environment, read_bounds
from omni_discovery.commands.stage_options import StageCheck, check_stage
from omni_discovery.deploy.document import DeployConfig, StageConfig, decode_deploy, encode_deploy
from omni_discovery.deploy.load import locate_model
from omni_discovery.deploy.pieces import why_late
from omni_discovery.deploy.topology import CPU, Topology, names_cpu, plan
from omni_discovery.deploy.trust.judge import check_document
from omni_discovery.errors import RegistryTlsError, RegistryUnavailableError
from omni_discovery.etcd.check import check_registry
from omni_discovery.etcd.config import RegistryConfig
from omni_discovery.plugins import check_packages
from omni_discovery.records.keys import beat_key, hub_key, pipeline_key, replicas_prefix
from omni_discovery.sockets.listen import bind

if TYPE_CHECKING:
    from hub.serve.running_hub import ServeConfig
    from omni_discovery.deploy.trust.bounds import Bounds
    from omni_discovery.etcd.config import RegistrySecurity

#: One line of a table, cell by cell.
Row = tuple[str, ...]

_ANSWER_S: Final = 3.0


def dry_run_hub(arguments: argparse.Namespace, config: ServeConfig) -> int:
    """Print the plan of this hub; return 0. Raise OmniError if the hub could not start."""
    local_stages, deploy = stages_on_host(arguments, config.deploy), config.deploy
    topology = plan(deploy, local_stages, on_this_machine=arguments.worker_backend != RAY)
    pipeline = _agree(config)
    devices = check_on_host(arguments, deploy, local_stages, read_bounds(arguments).owning(deploy))
    for listener in bind(config.host, config.port):
        listener.close()
    hub = [
        ("HTTP", f"{config.host}:{config.port or '<a free port>'}, the API of {config.api}{_servers(config)}"),
        ("picks by", config.policy),
        *_data_plane(arguments),
    ]
    writes = [
        (pipeline_key(config.namespace), "stays", "the deploy document, if there is none"),
        (hub_key(config.namespace, "<id>"), "leased", "this hub"),
        (beat_key(config.namespace, "<id>"), "leased", "this hub's beats"),
    ]
    _print(
        ("hub", hub),
        ("registry", _registry(config.endpoints, config.namespace, config.ttl_s, pipeline)),
        *_layout(arguments, deploy, local_stages, topology, devices),
        ("would be written", [*writes, *_records(config.namespace, local_stages)]),
    )
    return 0


def dry_run_headless(arguments: argparse.Namespace, security: RegistrySecurity) -> int:
    """Print the plan of this supervisor; return 0. Raise OmniError if the supervisor could not start."""
    if arguments.worker_backend != RAY:
        check_packages(arguments.stage_id)
    ttl_s, namespace = arguments.omni_heartbeat_timeout, arguments.namespace
    registry = RegistryConfig(arguments.etcd_endpoints, namespace, security, ttl_s=ttl_s)
    in_force = check_registry(registry, _ANSWER_S)
    title = ("registry", _registry(arguments.etcd_endpoints, namespace, ttl_s, _IN_FORCE if in_force else _WAITS))
    supervisor = ("supervisor", [("of stage", str(arguments.stage_id)), *_data_plane(arguments)])
    if in_force is None:
        _print(supervisor, title)
        return 0
    deploy = decode_deploy(in_force, pipeline_key(namespace))
    bounds = read_bounds(arguments)
    check_document(deploy, arguments.stage_id, bounds, locate_model)
    local_stages = stages_on_host(arguments, deploy)
    topology = plan_on_host(arguments, deploy, local_stages)
    devices = check_on_host(arguments, deploy, local_stages, bounds)
    _print(
        supervisor,
        title,
        *_layout(arguments, deploy, local_stages, topology, devices),
        ("would be written", [*_records(namespace, local_stages)]),
    )
    return 0


_IN_FORCE: Final = "the one in force, as it stands in etcd"
_WAITS: Final = "none is in force yet: the replicas would wait for the first hub's, and devices are not known before"


#: The devices of each replica here, by stage; None for whatever there is.
Devices = Mapping[int, Sequence[Sequence[str] | None]]


def check_on_host(
    arguments: argparse.Namespace, deploy: DeployConfig, local_stages: StagesOnHost, bounds: Bounds
) -> Devices:
    """Check engine, model, devices and connectors of each stage in a process of its own. Raise ConfigError."""
    devices: dict[int, Sequence[Sequence[str] | None]] = {}
    for stage, count in () if arguments.worker_backend == RAY else local_stages:
        check = StageCheck(stage=stage, deploy=deploy, count=count, bounds=bounds)
        told = check_stage(check, child_environment())
        if told is not None:
            devices[stage.stage_id] = told.of_replicas
    return devices


def _agree(config: ServeConfig) -> str:
    """Whether the document would be put, or is in force already, as text.

    Raise ConfigError if another document is in force, RegistryError if etcd refuses the login or the certificate.
    """
    from hub.serve.running_hub import check_none_embedded

    if config.endpoints is None:
        check_none_embedded(config)
        return "ours, in an etcd that begins empty"
    registry = RegistryConfig(config.endpoints, config.namespace, config.security, ttl_s=config.ttl_s)
    try:
        in_force = check_registry(registry, _ANSWER_S)
    except RegistryTlsError:
        raise
    except RegistryUnavailableError:
        return "not known: no etcd answers now"
    if in_force is None:
        return f"none is in force yet: ours would be put, {len(encode_deploy(config.deploy))} bytes"
    check_pipeline(in_force, config.deploy, config.namespace)
    return "ours is in force already"


def _registry(endpoints: str | None, namespace: str, ttl_s: float, pipeline: str) -> list[Row]:
    return [
        ("etcd", endpoints or "one of our own, on a socket of this user"),
        ("namespace", namespace),
        ("TTL", f"{ttl_s:g} s; whether etcd grants it is asked at the start only"),
        ("pipeline", pipeline),
    ]


def _servers(config: ServeConfig) -> str:
    return f", by {config.api_servers} hub processes" if config.api_servers > 1 else ""


def _data_plane(arguments: argparse.Namespace) -> list[Row]:
    return [
        ("advertises", arguments.omni_replica_address or "the address that leads to etcd"),
        ("encryption", arguments.zmq_security),
        ("labels", ", ".join(arguments.label) or "none"),
    ]


def _layout(
    arguments: argparse.Namespace,
    deploy: DeployConfig,
    local_stages: StagesOnHost,
    topology: Topology,
    inherited: Devices,
) -> Sequence[tuple[str, list[Row]]]:
    counts = {stage.stage_id: count for stage, count in local_stages}
    stages: list[Row] = [("id", "engine", "model", "input from", "output", "replicas here")]
    for stage in deploy.stages:
        before = ", ".join(str(each) for each in deploy.inputs_of(stage.stage_id)) or "the client"
        count = str(counts.get(stage.stage_id, 0))
        stages.append((str(stage.stage_id), stage.engine, stage.model or "-", before, stage.final_output, count))
    here = {stage.stage_id: stage for stage, _ in local_stages}
    # Where no stage names a Python, all run in this one.
    has_own = any(stage.runtime.own_python for stage in here.values())
    replicas: list[Row] = [("stage", "#", "devices", *("python",) * has_own, "free ports for")]
    for each in topology.replicas:
        shares = inherited.get(each.stage_id, ())
        share = shares[each.ordinal] if each.ordinal < len(shares) else None
        devices = ",".join(each.devices) or _unnamed(arguments, here[each.stage_id], share)
        python = (here[each.stage_id].runtime.own_python or "this one",) * has_own
        replicas.append((str(each.stage_id), str(each.ordinal), devices, *python, ", ".join(each.ports)))
    edges: list[Row] = [("from", "to", "connector", "settings", "the next stage begins on")]
    for edge in topology.edges:
        settings = ", ".join(f"{name}={value}" for name, value in edge.settings.items()) or "defaults"
        begins = "the first piece" if edge.in_pieces else "the whole hand-off"
        begins += ", answers at the last" if why_late(deploy, edge.from_stage, edge.to_stage) else ""
        edges.append((str(edge.from_stage), str(edge.to_stage), edge.connector, settings, begins))
    return [("stages", stages), ("replicas here", replicas), ("edges", edges)]


def _unnamed(arguments: argparse.Namespace, stage: StageConfig, share: Sequence[str] | None) -> str:
    """What a replica gets for which the plan names no devices; ``share`` is its part of those that are shown here."""
    if arguments.worker_backend == RAY:
        return "Ray's choice"
    if stage.engine == "echo" or names_cpu(stage) or str(stage.engine_args.get("device", "")).startswith(CPU):
        return "CPU"
    if share is None:
        return "inherited, all that are there"
    return f"inherited: {','.join(share)}" if share else "CPU, none is shown here"


def _records(namespace: str, local_stages: StagesOnHost) -> list[Row]:
    return [
        (
            f"{replicas_prefix(namespace, stage.stage_id)}<lowest free id>",
            "leased",
            f"{count} replica {'record' if count == 1 else 'records'}",
        )
        for stage, count in local_stages
    ]


def _print(*sections: tuple[str, list[Row]]) -> None:
    say("The plan. Nothing was started, nothing was written.")
    for title, rows in sections:
        say("\n".join(["", title, *(f"  {line}" for line in aligned(rows))]))


def aligned(rows: Sequence[Row]) -> list[str]:
    """The rows as lines, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
