"""The deploy document: which stages a pipeline has, how they are joined, what runs each.

Written as YAML by people, kept as JSON under the namespace's ``pipeline`` key. Hubs build the stage graph from it,
replicas read their own stage's part. Unknown keys are errors, with the nearest known name as a hint.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from typing import Annotated, Any, Final, Literal

import msgspec
import yaml

from omni_discovery.errors import ConfigError

_StageId = Annotated[int, msgspec.Meta(ge=0, lt=1_000_000_000)]
FinalOutput = Literal["text", "image", "audio", "none"]

#: The connector that joins two stages when the document names none for their edge.
DEFAULT_CONNECTOR: Final = "AutoConnector"
#: How many pieces of one request may be under way on an edge that names no ``window_size``.
DEFAULT_WINDOW: Final = 16
_NO_BOUND: Final = 1 << 52


class RuntimeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a stage's local replicas run. ``devices``, as CUDA_VISIBLE_DEVICES has them, is split among them."""

    devices: str = ""
    num_replicas: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1


class StageConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One stage. ``input_from`` None means: the stage before it in the document."""

    stage_id: _StageId
    engine: Annotated[str, msgspec.Meta(min_length=1)]
    model: str = ""
    engine_args: dict[str, Any] = {}
    runtime: RuntimeConfig = RuntimeConfig()
    default_sampling_params: dict[str, Any] = {}
    final_output: FinalOutput = "none"
    input_from: tuple[_StageId, ...] | None = None


class EdgeConfig(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    kw_only=True,
    rename={"from_": "from"},
):
    """One edge of the graph and the connector, by its name in ``connectors``, that carries its payloads.

    Of one producer's hand-offs, ``window_size`` bounds those that nobody has fetched yet, ``max_inflight`` those that
    are not released yet; -1 is no bound. With ``async_chunk`` (None: the pipeline's) the next stage begins on the
    first piece of the hand-off, where the engine makes pieces, and ``window_size`` bounds the pieces of each request
    that the next stage has not taken.
    """

    from_: _StageId
    to: _StageId
    connector: str = ""
    window_size: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    max_inflight: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    async_chunk: bool | None = None


class ConnectorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One connector: the registered ``name`` of its class and what its constructor gets."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    extra: dict[str, Any] = {}


class DeployConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole document. ``model`` is the name that clients see; empty means the first stage's."""

    stages: tuple[StageConfig, ...]
    model: str = ""
    edges: tuple[EdgeConfig, ...] = ()
    connectors: dict[str, ConnectorConfig] = {}
    async_chunk: bool = False

    def stage(self, stage_id: int) -> StageConfig:
        """The stage with that id. Raise ConfigError naming those there are."""
        for stage in self.stages:
            if stage.stage_id == stage_id:
                return stage
        known = ", ".join(str(stage.stage_id) for stage in self.stages)
        raise ConfigError(f"stage {stage_id} is not in the pipeline; it has {known}")

    def inputs_of(self, stage_id: int) -> tuple[int, ...]:
        """The stages whose hand-off a stage takes; empty for the first."""
        stage = self.stage(stage_id)
        if stage.input_from is not None:
            return stage.input_from
        position = self.stages.index(stage)
        return (self.stages[position - 1].stage_id,) if position else ()

    def connector_of(self, from_stage: int, to_stage: int) -> ConnectorConfig:
        """The connector of an edge, with the edge's bounds in its ``extra``; the default one where none is named."""
        for edge in self.edges:
            if (edge.from_, edge.to) == (from_stage, to_stage):
                found = self.connectors[edge.connector] if edge.connector else ConnectorConfig(name=DEFAULT_CONNECTOR)
                window_size = None if self.async_chunk_of(from_stage, to_stage) else edge.window_size
                bounds = {"window_size": window_size, "max_inflight": edge.max_inflight}
                given = {name: bound for name, bound in bounds.items() if bound is not None}
                return msgspec.structs.replace(found, extra={**found.extra, **given})
        return ConnectorConfig(name=DEFAULT_CONNECTOR)

    def async_chunk_of(self, from_stage: int, to_stage: int, wanted: bool | None = None) -> bool:
        """Whether hand-offs travel this edge piece by piece. ``wanted`` is a request's own wish, None: it has none.

        An edge that says no means it; a request may turn the others on, and all of them off.
        """
        edge = self._edge(from_stage, to_stage)
        of_edge = None if edge is None else edge.async_chunk
        if wanted is not None:
            return wanted and of_edge is not False
        return self.async_chunk if of_edge is None else of_edge

    def window_of(self, from_stage: int, to_stage: int) -> int:
        """How many pieces of one request may be on their way between two stages; at least one."""
        edge = self._edge(from_stage, to_stage)
        window = DEFAULT_WINDOW if edge is None or edge.window_size is None else edge.window_size
        return _NO_BOUND if window < 0 else max(1, window)

    def _edge(self, from_stage: int, to_stage: int) -> EdgeConfig | None:
        return next((edge for edge in self.edges if (edge.from_, edge.to) == (from_stage, to_stage)), None)

    @property
    def served_name(self) -> str:
        """The model name of the HTTP API."""
        return self.model or self.stages[0].model.rstrip("/").rsplit("/", 1)[-1] or self.stages[0].engine


def parse_deploy(text: str, source: str) -> DeployConfig:
    """Read a deploy YAML. Raise ConfigError with the file, the place and what would be right."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        place = getattr(error, "problem_mark", None)
        where = f" line {place.line + 1}" if place is not None else ""
        raise ConfigError(f"{source}{where}: not YAML: {getattr(error, 'problem', None) or error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{source}: a deploy document is a mapping with the key 'stages'")
    return _convert(document, source)


def decode_deploy(value: bytes, source: str) -> DeployConfig:
    """Read the document as it stands in the registry. Raise ConfigError."""
    try:
        document = msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{source}: {error}") from error
    return _convert(document, source)


def encode_deploy(deploy: DeployConfig) -> bytes:
    """The document as JSON, the same bytes for the same content."""
    return msgspec.json.encode(deploy, order="sorted")


def fingerprint(stage: StageConfig) -> str:
    """What must be equal between replicas of one stage: a hash of its part of the deploy document."""
    content = msgspec.structs.replace(stage, runtime=RuntimeConfig())
    return hashlib.blake2b(msgspec.json.encode(content, order="sorted"), digest_size=8).hexdigest()


def _convert(document: Any, source: str) -> DeployConfig:
    try:
        deploy = msgspec.convert(document, DeployConfig)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(f"{source}: {_with_hint(str(error))}") from error
    _check(deploy, source)
    return deploy


def _check(deploy: DeployConfig, source: str) -> None:
    ids = [stage.stage_id for stage in deploy.stages]
    if not ids:
        raise ConfigError(f"{source}: 'stages' is empty; a pipeline needs at least one")
    if len(set(ids)) != len(ids):
        raise ConfigError(f"{source}: a stage_id appears twice in {ids}")
    if all(stage.final_output == "none" for stage in deploy.stages):
        raise ConfigError(f"{source}: no stage has a final_output; set one to text, image or audio")
    _check_order(deploy, source)
    for edge in deploy.edges:
        _check_edge(deploy, edge, source)


def _check_order(deploy: DeployConfig, source: str) -> None:
    seen: set[int] = set()
    for stage in deploy.stages:
        for before in deploy.inputs_of(stage.stage_id):
            if before not in seen:
                raise ConfigError(
                    f"{source}: stage {stage.stage_id} takes input from stage {before}, which does not stand before it"
                )
        seen.add(stage.stage_id)


def _check_edge(deploy: DeployConfig, edge: EdgeConfig, source: str) -> None:
    ids = [stage.stage_id for stage in deploy.stages]
    if edge.to not in ids or edge.from_ not in deploy.inputs_of(edge.to):
        raise ConfigError(f"{source}: the edge {edge.from_} to {edge.to} joins no two stages of the pipeline")
    if edge.connector and edge.connector not in deploy.connectors:
        known = ", ".join(sorted(deploy.connectors)) or "none"
        raise ConfigError(
            f"{source}: the edge {edge.from_} to {edge.to} wants connector {edge.connector!r}; there are: {known}"
        )


_KNOWN: Final = sorted(
    {
        name
        for struct in (DeployConfig, StageConfig, RuntimeConfig, EdgeConfig, ConnectorConfig)
        for name in struct.__struct_encode_fields__
    }
)


def _with_hint(message: str) -> str:
    found = re.search(r"unknown field `([^`]*)`", message)
    near = difflib.get_close_matches(found.group(1), _KNOWN, n=1) if found else []
    return f"{message} (did you mean '{near[0]}'?)" if near else message
