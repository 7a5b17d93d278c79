"""Asks vLLM-Omni which pipeline a model is. Runs in a process of its own, in the Python that has vLLM-Omni in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import yaml

from omni_discovery.deploy.document import StageConfig
from omni_discovery.deploy.resolution import ResolvedDocument, ResolveRequest
from omni_discovery.errors import ConfigError
from omni_discovery.text import essence
from stage_runtime.engines.vllm_omni.args import check_versions
from stage_runtime.engines.vllm_omni.pipeline import ENGINE, ResolvedPipeline, ResolvedStage, document_of

#: What vLLM-Omni raises for a model or a file that it can't read, or for a value that it refuses.
_REFUSALS: Final = (ValueError, OSError, KeyError, TypeError, AttributeError, NotImplementedError, yaml.YAMLError)
_TRUST: Final = "trust_remote_code"
#: Fields of vLLM-Omni's stage of a deploy file that are not settings of its engine.
_NO_SETTINGS: Final = frozenset(
    (
        *("stage_id", "devices", "num_replicas", "env", "async_chunk", "output_connectors", "input_connectors"),
        *("default_sampling_params", "default_pooling_params", "engine_extras"),
    )
)
#: Settings of a deploy file that hold for every stage.
_WIDE: Final = (
    *(_TRUST, "distributed_executor_backend", "dtype", "quantization", "enable_prefix_caching"),
    *("enable_chunked_prefill", "data_parallel_size", "pipeline_parallel_size", "custom_voice_dir"),
)


def resolve_document(request: ResolveRequest) -> ResolvedDocument:
    """The deploy document of a pipeline. Raise ConfigError for what vLLM-Omni refuses, and for what can't run here."""
    check_versions(StageConfig(stage_id=0, engine=ENGINE))
    return document_of(
        resolve(request),
        request.served_name or request.model,
        may_run_code=bool(request.engine_args.get(_TRUST)),
        overrides=request.overrides,
    )


def resolve(request: ResolveRequest) -> ResolvedPipeline:
    """What vLLM-Omni makes of a model and a deploy file. Raise ConfigError with its reason for what it refuses."""
    from vllm_omni.engine.arg_utils import register_omni_models_to_vllm

    register_omni_models_to_vllm()
    try:
        return _resolve(request)
    except _REFUSALS as error:
        file = f" with {request.deploy_file}" if request.deploy_file else ""
        alone = "" if file else " ('omni serve MODEL' without --omni serves a text model with vLLM)"
        raise ConfigError(f"vLLM-Omni can't resolve {request.model}{file}: {essence(error)}{alone}") from error


def _resolve(request: ResolveRequest) -> ResolvedPipeline:
    from vllm_omni.config.pipeline_registry import OMNI_PIPELINES
    from vllm_omni.config.resolver import resolve_omni_config
    from vllm_omni.platforms import current_omni_platform

    said = {name: value for name, value in request.engine_args.items() if name != _TRUST}
    if request.async_chunk is not None:
        said["async_chunk"] = request.async_chunk
    plan = resolve_omni_config(
        request.model,
        trust_remote_code=bool(request.engine_args.get(_TRUST)),
        deploy_config_path=request.deploy_file or None,
        cli_overrides=said,
        stage_overrides={},
        strategy_config_path=None,
    )
    deploy = _deploy_of(plan.config_path)
    name = getattr(plan.pipeline_config, "model_type", None) or "unknown"
    if deploy is not None and deploy.pipeline:
        name = deploy.pipeline
    by_id = {} if deploy is None else {each.stage_id: each for each in deploy.stages}
    wide = {key: value for key in _WIDE if (value := getattr(deploy, key, None)) is not None}
    return ResolvedPipeline(
        name=name,
        is_registered=name in OMNI_PIPELINES,
        platform=str(current_omni_platform.device_name or ""),
        async_chunk=any(each.connector_config.async_chunk for each in plan.stage_configs),
        model_runner=getattr(deploy, "model_runner", "v1"),
        session_mode=getattr(deploy, "session_mode", "turn"),
        connectors=dict(getattr(deploy, "connectors", None) or {}),
        edges=tuple(getattr(deploy, "edges", None) or ()),
        stages=tuple(
            _stage_of(each, by_id.get(each.stage_id), wide, request.engine_args) for each in plan.stage_configs
        ),
    )


def _deploy_of(file: str | None) -> Any:
    """The deploy file as vLLM-Omni reads it, with its base file and this platform's part."""
    from vllm_omni.config import stage_config

    if file is None:
        return None
    return stage_config._apply_platform_overrides(stage_config.load_deploy_config(file))  # noqa: SLF001 - 0.30 alone


def _stage_of(config: Any, deploy: Any, wide: Mapping[str, Any], said: Mapping[str, Any]) -> ResolvedStage:
    settings = dict(wide)
    if deploy is not None:
        named = {field.name: field.default for field in dataclasses.fields(deploy) if field.name not in _NO_SETTINGS}
        settings |= {name: value for name in named if (value := getattr(deploy, name)) != named[name]}
        settings |= deploy.engine_extras
    return ResolvedStage(
        stage_id=config.stage_id,
        model=str(config.model_config.model),
        input_sources=tuple(config.input_sources or ()),
        final_output=config.final_output_type if config.final_output else None,
        devices=config.runtime_config.devices,
        num_replicas=config.runtime_config.num_replicas,
        async_chunk=getattr(deploy, "async_chunk", None),
        settings={**settings, **said},
        default_sampling_params=dict(getattr(deploy, "default_sampling_params", None) or {}),
        input_connectors=dict(getattr(deploy, "input_connectors", None) or {}),
        output_connectors=dict(getattr(deploy, "output_connectors", None) or {}),
        env=dict(getattr(deploy, "env", None) or {}),
    )
