"""Turns what vLLM-Omni's resolver says of a pipeline into a deploy document of ours, and refuses what can't run. Pure.

The document holds the settings that the deploy file says, platform and base file included, and names the pipeline: the
replica builds each stage from these, not from the file that vLLM-Omni ships for the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from omni_discovery.deploy.dialect import Overrides, merged
from omni_discovery.deploy.document import StageConfig
from omni_discovery.deploy.resolution import ResolvedDocument
from omni_discovery.deploy.trust.connector_settings import OF_MODEL_CODE
from omni_discovery.errors import ConfigError
from stage_runtime.engines.vllm_omni.args import RUN, split_args

ENGINE: Final = "vllm-omni"
_SHARED_MEMORY: Final = "SharedMemoryConnector"
_TRUST: Final = "trust_remote_code"
_EXECUTOR: Final = "distributed_executor_backend"
#: Settings that the document does not hold, or only where the command line says so.
_NOT_HELD: Final = frozenset(("async_scheduling", _EXECUTOR, _TRUST))


class ResolvedStage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage as vLLM-Omni resolves it. ``settings`` are those that the deploy file or the command line says."""

    stage_id: int
    model: str
    input_sources: tuple[int, ...] = ()
    #: ``text``, ``audio`` and so on, if the client gets it.
    final_output: str | None = None
    devices: str | None = None
    num_replicas: int = 1
    async_chunk: bool | None = None
    settings: dict[str, Any] = {}
    default_sampling_params: dict[str, Any] = {}
    input_connectors: dict[str, Any] = {}
    output_connectors: dict[str, Any] = {}
    env: dict[str, Any] = {}


class ResolvedPipeline(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline as vLLM-Omni resolves it for the platform of the Python that was asked."""

    #: Its name in vLLM-Omni's registry; ``is_registered`` is false for one that is made for the model alone.
    name: str
    is_registered: bool = True
    platform: str = ""
    async_chunk: bool = False
    model_runner: str = "v1"
    session_mode: str = "turn"
    connectors: dict[str, Any] = {}
    edges: tuple[dict[str, Any], ...] = ()
    stages: tuple[ResolvedStage, ...]


def document_of(
    resolved: ResolvedPipeline, name: str, *, may_run_code: bool = False, overrides: Overrides | None = None
) -> ResolvedDocument:
    """The document of a pipeline that clients know as ``name``, with ``overrides`` of its stages merged in.

    Code that came with a model is only allowed with ``may_run_code``, whatever the file says. Raise ConfigError for
    what does not run here, with all reasons.
    """
    stages = [
        merged(_stage_of(each, resolved, may_run_code=may_run_code), (overrides or {}).get(each.stage_id, {}))
        for each in resolved.stages
    ]
    if problems := [*_refused(resolved, stages)]:
        raise ConfigError("; ".join(problems))
    document: dict[str, Any] = {"model": name, "async_chunk": resolved.async_chunk, "stages": stages}
    edges, connectors = _edges_of(resolved)
    document |= {key: value for key, value in (("edges", edges), ("connectors", connectors)) if value}
    return ResolvedDocument(
        document=document,
        left_out=tuple(_left_out(resolved, may_run_code=may_run_code)),
        pipeline=resolved.name,
        platform=resolved.platform,
    )


def _stage_of(stage: ResolvedStage, resolved: ResolvedPipeline, *, may_run_code: bool) -> dict[str, Any]:
    settings = {name: value for name, value in stage.settings.items() if name not in _NOT_HELD}
    if may_run_code and stage.settings.get(_TRUST):
        settings[_TRUST] = True
    engine_args: dict[str, Any] = {"async_chunk": resolved.async_chunk, **settings}
    if resolved.is_registered:
        engine_args["pipeline"] = resolved.name
    if extra := {name: value for name, value in _extra_of(stage, resolved).items() if name in OF_MODEL_CODE}:
        engine_args["connector_extra"] = extra
    runtime: dict[str, Any] = {} if stage.devices is None else {"devices": stage.devices}
    if stage.num_replicas != 1:
        runtime["num_replicas"] = stage.num_replicas
    params = {name: value for name, value in stage.default_sampling_params.items() if name != "detokenize"}
    ours: dict[str, Any] = {
        "stage_id": stage.stage_id,
        "engine": ENGINE,
        "model": stage.model,
        "engine_args": engine_args,
        "runtime": runtime,
        "default_sampling_params": params,
        "final_output": stage.final_output or "none",
        "input_from": list(stage.input_sources),
    }
    return {name: value for name, value in ours.items() if value or name not in ("runtime", "default_sampling_params")}


def _refused(resolved: ResolvedPipeline, stages: list[dict[str, Any]]) -> Iterator[str]:
    """What can't run here, by name."""
    configs = [msgspec.convert({**stage, "final_output": "none"}, StageConfig) for stage in stages]
    arguments = []
    for config in configs:
        try:
            arguments.append(split_args(config)[0])
        except ConfigError as error:
            yield str(error)
    if resolved.name not in RUN and not any(each.untested_pipeline for each in arguments):
        yield (
            f"vLLM-Omni's pipeline {resolved.name!r} was not run with this engine; run were {', '.join(RUN)}."
            " engine_args.untested_pipeline: true of a stage loads it all the same:"
            ' --stage-overrides \'{"0": {"engine_args": {"untested_pipeline": true}}}\''
        )
    if resolved.session_mode != "turn":
        yield f"session_mode is {resolved.session_mode!r}: this engine serves requests ('turn'), no open sessions"
    for stage in resolved.stages:
        if stage.env:
            words = " ".join(f"{name}={value}" for name, value in stage.env.items())
            yield (
                f"stage {stage.stage_id} says env: give its hosts these in the environment of 'omni serve', and take"
                f" env out of the file: {words}"
            )


def _left_out(resolved: ResolvedPipeline, *, may_run_code: bool) -> Iterator[str]:
    """What the file says and the document does not."""
    if resolved.model_runner == "v2":
        yield "model_runner: v2 (this engine steps model runner v1)"
    scheduled = [each.stage_id for each in resolved.stages if each.settings.get("async_scheduling")]
    if scheduled:
        yield f"async_scheduling of {_stages(scheduled)} (a step of this engine is one step of the model)"
    if executors := [each.stage_id for each in resolved.stages if each.settings.get(_EXECUTOR, "uni") != "uni"]:
        yield f"{_EXECUTOR} of {_stages(executors)} (a replica is one process)"
    trusting = [each.stage_id for each in resolved.stages if each.settings.get(_TRUST)]
    if trusting and not may_run_code:
        yield f"{_TRUST} of {_stages(trusting)} (code that came with a model runs with --trust-remote-code alone)"


def _stages(ids: list[int]) -> str:
    return f"stage{'s' * (len(ids) > 1)} {', '.join(map(str, ids))}"


def _edges_of(resolved: ResolvedPipeline) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The edges that need an entry, and the connectors that they name.

    Shared memory is not named: our default takes it on one host, and TCP between hosts.
    """
    said = {(edge.get("from"), edge.get("to")): edge for edge in resolved.edges}
    edges, connectors = [], {}
    for stage in resolved.stages:
        for before in stage.input_sources:
            edge = dict(said.pop((before, stage.stage_id), {"from": before, "to": stage.stage_id}))
            name, found = _connector_between(before, stage, resolved)
            if found and found.get("name") != _SHARED_MEMORY:
                extra = {key: value for key, value in _mapping(found.get("extra")).items() if key not in OF_MODEL_CODE}
                connectors[name] = {"name": found.get("name"), "extra": extra}
                edge["connector"] = name
            if stage.async_chunk is False and resolved.async_chunk:
                edge["async_chunk"] = False
            if len(edge) > 2:
                edges.append(edge)
    return [*edges, *said.values()], connectors


def _connector_between(before: int, stage: ResolvedStage, resolved: ResolvedPipeline) -> tuple[str, dict[str, Any]]:
    """The name and the description of the connector that either end names; empty if none does."""
    producers = [each for each in resolved.stages if each.stage_id == before]
    named = stage.input_connectors.get(f"from_stage_{before}") or next(
        (each.output_connectors.get(f"to_stage_{stage.stage_id}") for each in producers), None
    )
    return str(named or ""), _mapping(resolved.connectors.get(str(named)))


def _extra_of(stage: ResolvedStage, resolved: ResolvedPipeline) -> Mapping[str, Any]:
    """The settings of the connector at a stage: of its input; of the first stage, of its output."""
    for before in stage.input_sources:
        return _mapping(_connector_between(before, stage, resolved)[1].get("extra"))
    after = [each for each in resolved.stages if stage.stage_id in each.input_sources]
    return _mapping(_connector_between(stage.stage_id, after[0], resolved)[1].get("extra")) if after else {}


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}
