"""The deploy document: which stages a pipeline has, how they are joined, what runs each.

Written as YAML by people, kept as JSON under the namespace's ``pipeline`` key. Hubs build the stage graph from it,
replicas read their own stage's part. Unknown keys are errors, told all at once, each with a hint.

What to tell people of a value in a deploy document that can't be one: where it is, and what would be right. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

import msgspec
import yaml

from omni_discovery.deploy.dialect import CONNECTORS, Overrides, translate, unknown_keys
from omni_discovery.errors import ConfigError

#: What bounds an edge.
BOUND: Final = "a whole number from 1, or -1 for no bound"

_YES_OR_NO: Final = "true or false"
_WORDS: Final = "a word"
#: What would be right, by the name of the key.
_RIGHT: Final = {
    "final_output": "text, image, audio, embedding or none",
    "window_size": BOUND,
    "max_inflight": BOUND,
    "async_chunk": _YES_OR_NO,
    "connector": "the name of one in 'connectors', or a connector's own, as TcpConnector",
    "stage_id": "a whole number from 0",
    "from": "the id of a stage",
    "to": "the id of a stage",
    "input_from": "a list of stage ids, as [0]",
    "num_replicas": "a whole number from 1 to 1024",
    "devices": "a text like '0,1', empty for the CPU",
    "strategy": "PACK, SPREAD, STRICT_PACK or STRICT_SPREAD",
    "engine": "the name of an engine, as vllm or diffusion",
    "model": "a folder or a name, as text",
    "name": _WORDS,
    **dict.fromkeys(("num_cpus", "num_gpus"), "a number from 0"),
    **dict.fromkeys(
        ("engine_args", "default_sampling_params", "runtime", "ray", "extra", "connectors"),
        "a mapping of keys to values",
    ),
    **dict.fromkeys(("stages", "edges"), "a list"),
}
_PLACE: Final = re.compile(r" - at `\$(.*)`$", re.DOTALL)
_STEP: Final = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_LONGEST_VALUE: Final = 60


def wrong_value(told: str, document: Any) -> str:
    """What a decoder ``told`` of a document, in the document's own words; as it is where nothing better is known."""
    found = _PLACE.search(told)
    if found is None:
        return told
    steps: list[str | int] = [
        name if name else int(index) if index.isdigit() else index for name, index in _STEP.findall(found[1])
    ]
    try:
        place, value = _look_up(document, steps)
    except (KeyError, IndexError, TypeError):
        return told
    key = steps[-2] if steps[-2:-1] == ["input_from"] else steps[-1]
    if key not in _RIGHT or told.startswith("Object missing"):
        return f"{place}: {told[: found.start()]}"
    return f"{place} is {short_value(value)}; right would be {_RIGHT[str(key)]}"


def _look_up(document: Any, steps: list[str | int]) -> tuple[str, Any]:
    """A place in the words of people, and what stands there."""
    place, value = "", document
    for at, step in enumerate(steps):
        if step == "...":
            # Which of a mapping's values it is, the decoder does not say.
            break
        value = value[step]
        if isinstance(step, str):
            place += f".{step}" if at else step
        elif at == 1 and steps[0] == "stages" and isinstance(value, dict) and "stage_id" in value:
            place = f"stage {value['stage_id']}"
        elif at == 1 and steps[0] == "edges" and isinstance(value, dict) and {"from", "to"} <= value.keys():
            place = f"the edge {value['from']} to {value['to']}"
        else:
            place += f"[{step}]"
    return place, value


def short_value(value: Any) -> str:
    """A value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


_StageId = Annotated[int, msgspec.Meta(ge=0, lt=1_000_000_000)]
FinalOutput = Literal["text", "image", "audio", "embedding", "none"]

#: The connector that joins two stages when the document names none for their edge.
DEFAULT_CONNECTOR: Final = "AutoConnector"
#: How many pieces of one request may be under way on an edge that names no ``window_size``.
DEFAULT_WINDOW: Final = 16
_NO_BOUND: Final = 1 << 52


class RayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one replica takes of a Ray cluster, a bundle of the stage's placement group.

    ``num_gpus`` None: what the replica spans, if the stage names devices, else none. ``strategy`` is Ray's.
    """

    num_cpus: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    num_gpus: Annotated[float, msgspec.Meta(ge=0)] | None = None
    resources: dict[str, Annotated[float, msgspec.Meta(gt=0)]] = {}
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"


class RuntimeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a stage's local replicas run. ``devices``, as CUDA_VISIBLE_DEVICES has them, is split among them."""

    devices: str = ""
    num_replicas: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    ray: RayConfig | msgspec.UnsetType = msgspec.UNSET

    @property
    def on_ray(self) -> RayConfig:
        """What a replica takes of a Ray cluster, where it runs on one."""
        return RayConfig() if self.ray is msgspec.UNSET else self.ray


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
        edge = self._edge(from_stage, to_stage)
        if edge is None:
            return ConnectorConfig(name=DEFAULT_CONNECTOR)
        found = self.connectors[edge.connector] if edge.connector else ConnectorConfig(name=DEFAULT_CONNECTOR)
        window_size = None if self.async_chunk_of(from_stage, to_stage) else edge.window_size
        bounds = {"window_size": window_size, "max_inflight": edge.max_inflight}
        given = {name: bound for name, bound in bounds.items() if bound is not None}
        return msgspec.structs.replace(found, extra={**found.extra, **given})

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


def parse_deploy(
    text: str, source: str, overrides: Overrides = MappingProxyType({}), installed: Collection[str] = ()
) -> DeployConfig:
    """Read a deploy YAML, ours or one written for vLLM-Omni, and merge ``overrides`` into its stages before any check.

    ``installed`` are connectors of other packages that edges may name directly. Raise ConfigError with the file, the
    places and what would be right.
    """
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        place = getattr(error, "problem_mark", None)
        where = f" line {place.line + 1}" if place is not None else ""
        raise ConfigError(f"{source}{where}: not YAML: {getattr(error, 'problem', None) or error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{source}: a deploy document is a mapping with the key 'stages'")
    return read_deploy(document, source, overrides, installed)


def read_deploy(
    document: Mapping[str, Any],
    source: str,
    overrides: Overrides = MappingProxyType({}),
    installed: Collection[str] = (),
) -> DeployConfig:
    """Like ``parse_deploy``, of a document that is a mapping already. Raise ConfigError."""
    try:
        ours = translate(document, KNOWN_KEYS, overrides, installed)
    except RecursionError as error:
        raise ConfigError(f"{source}: a part of it holds itself") from error
    deploy = _convert(ours, source)
    for stage_id in overrides:
        deploy.stage(stage_id)
    return deploy


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


def _convert(document: Any, source: str) -> DeployConfig:
    if isinstance(document, dict) and (told := unknown_keys(document, KNOWN_KEYS)):
        raise ConfigError(f"{source}: {tell_all(told)}")
    try:
        deploy = msgspec.convert(document, DeployConfig)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(f"{source}: {wrong_value(str(error), document)}") from error
    _check(deploy, source)
    return deploy


def _check(deploy: DeployConfig, source: str) -> None:
    ids = [stage.stage_id for stage in deploy.stages]
    if not ids:
        raise ConfigError(f"{source}: 'stages' is empty; a pipeline needs at least one")
    if len(set(ids)) != len(ids):
        raise ConfigError(f"{source}: a stage_id appears twice in {ids}")
    if all(stage.final_output == "none" for stage in deploy.stages):
        raise ConfigError(f"{source}: no stage has a final_output; set one to text, image, audio or embedding")
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
        known = ", ".join([*sorted(deploy.connectors), *CONNECTORS])
        raise ConfigError(
            f"{source}: the edge {edge.from_} to {edge.to} wants connector {edge.connector!r}; there are: {known}"
        )
    for name, bound in (("window_size", edge.window_size), ("max_inflight", edge.max_inflight)):
        if bound == 0:
            raise ConfigError(f"{source}: the edge {edge.from_} to {edge.to}: {name} is 0; right would be {BOUND}")


#: The keys of each part of a document.
KNOWN_KEYS: Final = {
    "document": DeployConfig.__struct_encode_fields__,
    "stage": StageConfig.__struct_encode_fields__,
    "runtime": RuntimeConfig.__struct_encode_fields__,
    "edge": EdgeConfig.__struct_encode_fields__,
    "connector": ConnectorConfig.__struct_encode_fields__,
}


def tell_all(told: Sequence[str]) -> str:
    """One thing that is wrong on the line, several each on a line of its own."""
    return told[0] if len(told) == 1 else f"{len(told)} keys are wrong:" + "".join(f"\n  {each}" for each in told)
