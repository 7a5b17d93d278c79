"""Changes to a deploy document on the command line: ``--stage-overrides``, and a threshold for all edges. Pure.

Changes of a stage's ``runtime`` hold on this host only; all others become part of the document for all hosts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from omni_discovery.deploy.dialect import (
    ASYNC_CHUNK,
    CONNECTORS,
    VLLM_OMNI,
    Overrides,
    merged,
    translate_stage,
    unknown_stage_keys,
)
from omni_discovery.deploy.document import (
    DEFAULT_CONNECTOR,
    KNOWN_KEYS,
    ConnectorConfig,
    DeployConfig,
    EdgeConfig,
    RuntimeConfig,
    StageConfig,
    join_problems,
)
from omni_discovery.deploy.lines import Problem
from omni_discovery.errors import ConfigError

FLAG: Final = "--stage-overrides"
_RIGHT: Final = """right would be JSON by stage id, for example '{"0": {"engine_args": {"max_num_seqs": 4}}}'"""


def parse_overrides(text: str | None) -> dict[int, dict[str, Any]]:
    """Parse the flag into changes by stage id, in the deploy document's keys. Raise ConfigError with all wrong keys."""
    if not text:
        return {}
    try:
        document = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{FLAG} is not JSON ({error}); {_RIGHT}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{FLAG} is no mapping; {_RIGHT}")
    found: dict[int, dict[str, Any]] = {}
    problems: list[Problem] = []
    for name, part in document.items():
        if not (name.isascii() and name.isdigit() and isinstance(part, dict)):
            raise ConfigError(f"{FLAG} says {part!r} of {name!r}; {_RIGHT}")
        if "stage_id" in part:
            raise ConfigError(f"{FLAG} can't give stage {name} another stage_id; write a new document")
        ours = translate_stage(part, KNOWN_KEYS)
        problems += unknown_stage_keys(f"stage {name}.", ours, KNOWN_KEYS)
        found[int(name)] = ours
    if problems:
        raise ConfigError(join_problems(problems, FLAG))
    return found


def of_the_document(overrides: Overrides) -> dict[int, dict[str, Any]]:
    """Return the changes that become part of the document: all but ``runtime``."""
    parts = {
        stage_id: {name: value for name, value in part.items() if name != "runtime"}
        for stage_id, part in overrides.items()
    }
    return {stage_id: part for stage_id, part in parts.items() if part}


def of_this_host(overrides: Overrides) -> dict[int, Mapping[str, Any]]:
    """Return the changes of ``runtime`` by stage id. Raise ConfigError for one that is no mapping."""
    found = {stage_id: part["runtime"] for stage_id, part in overrides.items() if "runtime" in part}
    for stage_id, runtime in found.items():
        if not isinstance(runtime, dict):
            raise ConfigError(f"{FLAG}: stage {stage_id}.runtime is {runtime!r}; right would be a mapping")
    return found


def on_this_host(stage: StageConfig, here: Mapping[str, Any]) -> StageConfig:
    """Return the stage with the changes of its ``runtime`` on this host merged in. Raise ConfigError."""
    if not here:
        return stage
    try:
        runtime = msgspec.convert(merged(msgspec.to_builtins(stage.runtime), here), RuntimeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{FLAG}: stage {stage.stage_id}.runtime: {error}") from error
    return msgspec.structs.replace(stage, runtime=runtime)


def document_here(deploy: DeployConfig, stage_id: int, runtime: Mapping[str, Any]) -> DeployConfig:
    """The document in force with the ``runtime`` that one stage has on this host. Raise ConfigError."""
    stages = tuple(on_this_host(stage, runtime) if stage.stage_id == stage_id else stage for stage in deploy.stages)
    return msgspec.structs.replace(deploy, stages=stages)


def with_async_chunk(deploy: DeployConfig, *, async_chunk: bool) -> DeployConfig:
    """The document with another ``async_chunk``, also where a stage's engine has to know it."""
    stages = [
        msgspec.structs.replace(stage, engine_args={**stage.engine_args, ASYNC_CHUNK: async_chunk})
        if stage.engine == VLLM_OMNI and (async_chunk or ASYNC_CHUNK in stage.engine_args)
        else stage
        for stage in deploy.stages
    ]
    return msgspec.structs.replace(deploy, async_chunk=async_chunk, stages=tuple(stages))


def with_omni_python(stage: StageConfig, here: Mapping[str, Any], python: str) -> Mapping[str, Any]:
    """The changes of a stage's ``runtime`` on this host, with the Python that has vLLM-Omni, if the stage needs it."""
    return {"python": python, **here} if python and stage.engine == VLLM_OMNI else here


def with_shm_threshold(deploy: DeployConfig, threshold_bytes: int) -> DeployConfig:
    """The document with ``shm_threshold_bytes`` in every built-in connector of an edge that does not say it."""
    edges, connectors = list(deploy.edges), dict(deploy.connectors)
    for to in (stage.stage_id for stage in deploy.stages):
        for before in deploy.inputs_of(to):
            index = next((at for at, edge in enumerate(edges) if (edge.from_, edge.to) == (before, to)), len(edges))
            if index == len(edges):
                edges.append(EdgeConfig(from_=before, to=to))
            if not edges[index].connector:
                edges[index] = msgspec.structs.replace(edges[index], connector=DEFAULT_CONNECTOR)
                connectors.setdefault(DEFAULT_CONNECTOR, ConnectorConfig(name=DEFAULT_CONNECTOR))
            name = edges[index].connector
            found = connectors[name]
            if found.name in CONNECTORS:
                extra = {"shm_threshold_bytes": threshold_bytes, **found.extra}
                connectors[name] = msgspec.structs.replace(found, extra=extra)
    return msgspec.structs.replace(deploy, edges=tuple(edges), connectors=connectors)


def check_headless(overrides: Overrides) -> None:
    """Raise ConfigError for changes other than of ``runtime``: a headless supervisor has no document to change."""
    if parts := of_the_document(overrides):
        stage_id, part = next(iter(parts.items()))
        raise ConfigError(
            f"{FLAG} on --headless says only how the stage runs here, as in "
            f"""'{{"{stage_id}": {{"runtime": {{"devices": "0"}}}}}}'; stage {stage_id}.{next(iter(part))} is part """
            "of the pipeline in force: say it to the hubs, or with 'omni pipeline apply'"
        )
