"""The plan of one ``omni serve``: the stages of the deploy document that run on this host, checked before the start."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hub.api.served_stage import serving_stage
from hub.serve.document_flags import document_of
from omni_discovery.commands.flags import RAY
from omni_discovery.commands.registry import read_bounds
from omni_discovery.commands.stage_options import StageOptions, read_stage_options
from omni_discovery.deploy.document import DeployConfig, StageConfig
from omni_discovery.deploy.load import check_model_places, doubtful_connectors, doubtful_engines
from omni_discovery.deploy.overrides import FLAG, of_this_host, on_this_host, parse_overrides, with_omni_python
from omni_discovery.deploy.pieces import late_edges
from omni_discovery.deploy.topology import Topology, plan
from omni_discovery.errors import ConfigError
from omni_discovery.plugins import CONNECTOR_GROUPS, ENGINE_GROUPS, check_packages, find_plugins

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

#: The stages that run on this host, with its overrides applied, and the number of replicas of each.
StagesOnHost = Sequence[tuple[StageConfig, int]]


def deploy_of(arguments: argparse.Namespace) -> DeployConfig:
    """The deploy document of the flags, with the stage in it that is to run here.

    Raise ConfigError, or RegistryError where the one in force is wanted and can't be read.
    """
    deploy = document_of(arguments)
    if arguments.stage_id is not None:
        deploy.stage(arguments.stage_id)
    if arguments.api == "vllm":
        # Checked here, because importing vLLM takes long.
        serving_stage(deploy)
    return deploy


def stages_on_host(arguments: argparse.Namespace, deploy: DeployConfig) -> StagesOnHost:
    """The stages that the flags run on this host. Raise ConfigError."""
    overrides = of_this_host(parse_overrides(arguments.stage_overrides))
    for stage_id in overrides:
        deploy.stage(stage_id)
    stages = []
    for stage in () if arguments.hub_only else deploy.stages:
        if arguments.stage_id in (None, stage.stage_id):
            override = with_omni_python(stage, overrides.get(stage.stage_id, {}), arguments.omni_python)
            local = on_this_host(stage, override)
            stages.append((local, replica_count(arguments, local, override)))
    return stages


def replica_count(arguments: argparse.Namespace, stage: StageConfig, override: Mapping[str, Any]) -> int:
    """The number of local replicas of a stage: the document's; with ``--stage-id`` the flag's, else 1."""
    by_document = stage.runtime.num_replicas
    if arguments.stage_id is None:
        return by_document
    return int(arguments.omni_dp_size_local or (by_document if "num_replicas" in override else 1))


def plan_on_host(arguments: argparse.Namespace, deploy: DeployConfig, local_stages: StagesOnHost) -> Topology:
    """Lay out what runs on this host. Raise ConfigError for what can't run here; possible slips are logged.

    Engines and connectors of stages that run elsewhere need not be installed here: an unknown one is a warning.
    """
    engines, connectors = find_plugins(ENGINE_GROUPS), find_plugins(CONNECTOR_GROUPS)
    on_this_machine = arguments.worker_backend != RAY
    if on_this_machine:
        _check_stages([stage for stage, _ in local_stages], engines)
        for stage, _ in local_stages:
            check_model_places(deploy, stage.stage_id, read_bounds(arguments))
        _check_connectors(deploy, [stage.stage_id for stage, _ in local_stages], connectors)
    for doubt in doubtful_engines(deploy.stages, engines):
        logger.warning("deploy.engine_unknown %s", doubt)
    for doubt in doubtful_connectors(deploy, None, connectors):
        logger.warning("deploy.connector_unknown %s", doubt)
    for warning in late_edges(deploy):
        logger.warning("deploy.async_chunk %s", warning)
    topology = plan(deploy, local_stages, on_this_machine=on_this_machine)
    for warning in topology.warnings:
        logger.warning("deploy.devices %s", warning)
    return topology


def _check_connectors(deploy: DeployConfig, stage_ids: Collection[int], installed: Collection[str]) -> None:
    if doubts := doubtful_connectors(deploy, stage_ids, installed):
        raise ConfigError("; ".join(doubts))


def _check_stages(local_stages: Sequence[StageConfig], installed: Collection[str]) -> None:
    if doubts := doubtful_engines(local_stages, installed):
        raise ConfigError("; ".join(doubts))
    for stage in local_stages:
        if not stage.runtime.own_python:
            check_packages(stage.stage_id, stage.engine)
        if stage.model.startswith("/") and not Path(stage.model).exists():
            raise ConfigError(f"stage {stage.stage_id}: the model folder {stage.model} does not exist; correct 'model'")


def supervisor_options(
    local_stages: StagesOnHost, arguments: argparse.Namespace, deploy: DeployConfig
) -> tuple[StageOptions, ...]:
    """The settings of the supervisors, one for each stage that runs here. Raise ConfigError.

    They trust ``deploy``, the document of this command line, and what else the flags allow.
    """
    overrides = of_this_host(parse_overrides(arguments.stage_overrides))
    elsewhere = sorted(set(overrides) - {stage.stage_id for stage, _ in local_stages})
    if elsewhere:
        logger.warning("flag.ignored %s: the runtime of stages %s, which do not run here", FLAG, elsewhere)
    options = (
        read_stage_options(arguments, stage.stage_id, count, overrides.get(stage.stage_id, {}))
        for stage, count in local_stages
    )
    # Their metrics are the hub's: the port and its token are not theirs.
    no_port: dict[str, Any] = {"metrics_port": None, "metrics_token_file": ""}
    return tuple(msgspec.structs.replace(each, bounds=each.bounds.owning(deploy), **no_port) for each in options)
