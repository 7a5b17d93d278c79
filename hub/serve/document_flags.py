"""The flags of ``omni serve`` that name the deploy document, or say something otherwise than it does."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from hub.api.served_stage import stages_read_here
from hub.serve.foreign_flags import engine_args_of, served_name, serves_model_alone, stage_of_model
from hub.serve.vllm_omni.resolve import (
    add_omni_options,
    asks_vllm_omni,
    check_omni_options,
    python_of_omni,
    resolve_document,
    resolve_request,
    without_python,
)
from omni_discovery.commands.registry import ANSWER_S, read_bounds, read_security
from omni_discovery.deploy.dialect import merged
from omni_discovery.deploy.document import DeployConfig, decode_deploy, encode_deploy, read_deploy
from omni_discovery.deploy.load import check_model_place, check_model_places, load_deploy, locate_model
from omni_discovery.deploy.overrides import FLAG, of_the_document, parse_overrides, with_async_chunk, with_shm_threshold
from omni_discovery.deploy.trust.judge import check_document
from omni_discovery.errors import ConfigError
from omni_discovery.etcd.check import check_registry, waiting_hosts
from omni_discovery.etcd.config import RegistryConfig
from omni_discovery.records.keys import pipeline_key

logger = logging.getLogger(__name__)

_SAMPLING: Final = "--default-sampling-params"
_SAMPLING_RIGHT: Final = """right would be JSON by stage id, for example '{"0": {"temperature": 0.5}}'"""


def add_document_options(group: argparse._ActionsContainer) -> None:
    """Add these flags."""
    group.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="with --deploy-config: the model of stages that name none; without: one vLLM text stage of it, which takes"
        " the engine's flags of vllm serve",
    )
    group.add_argument("--model", dest="model_flag", metavar="MODEL", help="the same")
    group.add_argument("--deploy-config", type=Path, metavar="YAML", help="the stages of the pipeline")
    group.add_argument(
        "--stage-configs-path", type=Path, metavar="YAML", help="the same as --deploy-config, by its former name"
    )
    group.add_argument(
        "--stage-overrides",
        metavar="JSON",
        help='what the document says otherwise, by stage id: \'{"0": {"engine_args": {"max_num_seqs": 4}}}\';'
        " 'runtime' holds for this host alone, all else for everybody",
    )
    group.add_argument(
        _SAMPLING,
        metavar="JSON",
        help="sampling parameters where a request sets none, by stage id, over those of the document:"
        ' \'{"0": {"temperature": 0.5}}\'',
    )
    group.add_argument(
        "--async-chunk",
        action=argparse.BooleanOptionalAction,
        help="whether the next stage begins on the first piece of a hand-off, in place of the document's 'async_chunk'",
    )
    group.add_argument(
        "--shm-threshold-bytes",
        type=int,
        metavar="N",
        help="shorter hand-offs travel inside messages, others by the connector; for connectors that do not say it",
    )
    add_omni_options(group)


def merge_names(arguments: argparse.Namespace) -> None:
    """Let ``--model`` be MODEL, ``--stage-configs-path`` be ``--deploy-config``. Raise ConfigError for two values."""
    for first, second, flags in (
        ("model", "model_flag", "MODEL and --model"),
        ("deploy_config", "stage_configs_path", "--deploy-config and --stage-configs-path"),
    ):
        said = vars(arguments)
        ours, same = said[first], said[second]
        if None not in (ours, same) and ours != same:
            raise ConfigError(f"{flags} are the same thing, and say {ours} and {same}: leave one out")
        said[first] = same if ours is None else ours


def check_document_options(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for flags about the document that are wrong, or given to ``--headless``, which has none."""
    given = {
        _SAMPLING: arguments.default_sampling_params,
        "--shm-threshold-bytes": arguments.shm_threshold_bytes,
        "--async-chunk": arguments.async_chunk,
    }
    for flag, value in given.items():
        if arguments.headless and value is not None:
            raise ConfigError(f"{flag} is part of the pipeline in force: say it to the hubs, not to --headless")
    threshold = arguments.shm_threshold_bytes
    if threshold is not None and threshold < 0:
        raise ConfigError(f"--shm-threshold-bytes is {threshold}; right would be 0 or more")
    _sampling_params(arguments)
    check_omni_options(arguments)


def joins_pipeline(arguments: argparse.Namespace) -> bool:
    """Whether a hub takes the document in force from etcd: one without replicas and without a document of its own."""
    has_own = arguments.deploy_config is not None or bool(arguments.model)
    return bool(arguments.hub_only and arguments.etcd_endpoints and not has_own)


def document_of(arguments: argparse.Namespace) -> DeployConfig:
    """The deploy document of the flags: ``--deploy-config``, what MODEL is, or the one in force.

    Raise ConfigError, or RegistryError where the one in force is wanted and can't be read.
    """
    deploy = _document_of(arguments)
    for stage_id in stages_read_here(deploy, arguments.api):
        check_model_places(deploy, stage_id, read_bounds(arguments))
    return deploy


def _document_of(arguments: argparse.Namespace) -> DeployConfig:
    if joins_pipeline(arguments):
        return with_flags(_document_in_force(arguments), arguments)
    overrides = document_overrides(arguments)
    if asks_vllm_omni(arguments):
        return _document_of_vllm_omni(arguments, overrides)
    if serves_model_alone(arguments):
        deploy = read_deploy(stage_of_model(arguments), "MODEL", overrides)
    else:
        deploy = load_deploy(arguments.deploy_config, arguments.model, overrides)
    return _with_flags(deploy, arguments)


def _document_of_vllm_omni(arguments: argparse.Namespace, overrides: dict[int, dict[str, Any]]) -> DeployConfig:
    """What vLLM-Omni makes of MODEL and its deploy file; without a Python to ask, the one of this model in force."""
    engine_args = engine_args_of(arguments.foreign)
    if python := python_of_omni(arguments):
        check_model_place(str(arguments.model), read_bounds(arguments))
        request = resolve_request(arguments, engine_args, served_name(arguments.foreign), overrides)
        return _with_flags(resolve_document(python, request), arguments)
    if not arguments.etcd_endpoints:
        raise without_python(arguments)
    if _pipeline_in_force(arguments) is None:
        raise without_python(arguments, waiting_hosts(_registry_of(arguments)))
    deploy = _document_in_force(arguments)
    if str(arguments.model) not in (deploy.model, *(stage.model for stage in deploy.stages)):
        raise ConfigError(
            f"namespace {arguments.namespace!r} serves {deploy.served_name}, not {arguments.model}: give this hub a"
            " --namespace of its own, or leave MODEL out to serve what is in force (--hub-only)"
        )
    if engine_args:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in engine_args)
        raise ConfigError(f"{flags}: part of the pipeline, which etcd has already: say it to the hub that resolves it")
    return with_flags(deploy, arguments)


def _registry_of(arguments: argparse.Namespace) -> RegistryConfig:
    return RegistryConfig(arguments.etcd_endpoints, arguments.namespace, read_security(arguments))


def _pipeline_in_force(arguments: argparse.Namespace) -> bytes | None:
    return check_registry(_registry_of(arguments), ANSWER_S)


def _document_in_force(arguments: argparse.Namespace) -> DeployConfig:
    namespace = arguments.namespace
    in_force = _pipeline_in_force(arguments)
    if in_force is None:
        raise ConfigError(
            f"namespace {namespace!r} has no pipeline yet: give --deploy-config YAML,"
            " or start the hub that has the file first"
        )
    deploy = decode_deploy(in_force, pipeline_key(namespace))
    for stage_id in stages_read_here(deploy, arguments.api):
        check_document(deploy, stage_id, read_bounds(arguments), locate_model)
    stages = [stage.stage_id for stage in deploy.stages]
    logger.info("deploy.in_force namespace=%s model=%s stages=%s", namespace, deploy.served_name, stages)
    return deploy


def with_flags(deploy: DeployConfig, arguments: argparse.Namespace) -> DeployConfig:
    """A document that is loaded already, with what these flags say otherwise. Raise ConfigError."""
    if overrides := document_overrides(arguments):
        deploy = read_deploy(msgspec.json.decode(encode_deploy(deploy)), FLAG, overrides)
    return _with_flags(deploy, arguments)


def document_overrides(arguments: argparse.Namespace) -> dict[int, dict[str, Any]]:
    """What ``--stage-overrides`` and ``--default-sampling-params`` say of the document's stages. Raise ConfigError."""
    overrides = of_the_document(parse_overrides(arguments.stage_overrides))
    for stage_id, params in _sampling_params(arguments).items():
        of_stage = merged(overrides.get(stage_id, {}), {"default_sampling_params": params})
        overrides = {**overrides, stage_id: of_stage}
    return overrides


def _with_flags(deploy: DeployConfig, arguments: argparse.Namespace) -> DeployConfig:
    if arguments.async_chunk is not None:
        deploy = with_async_chunk(deploy, async_chunk=arguments.async_chunk)
    if arguments.shm_threshold_bytes is not None:
        deploy = with_shm_threshold(deploy, arguments.shm_threshold_bytes)
    return deploy


def _sampling_params(arguments: argparse.Namespace) -> Mapping[int, dict[str, Any]]:
    if arguments.default_sampling_params is None:
        return {}
    try:
        return msgspec.json.decode(arguments.default_sampling_params, type=dict[int, dict[str, Any]])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{_SAMPLING} is not such JSON ({error}); {_SAMPLING_RIGHT}") from error
