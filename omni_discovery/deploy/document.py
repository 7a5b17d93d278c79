"""The deploy document: which stages a pipeline has, how they are joined, what runs each.

Written as YAML by people, kept as JSON under the namespace's ``pipeline`` key. Hubs build the stage graph from it,
replicas read their own stage's part. Unknown keys are errors, all reported at once, each with a hint; a wrong value is
reported with its place and what would be right, and with its line if the document comes from a file. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin

import msgspec
import yaml

from omni_discovery.deploy.checks import BOUND, Part, Parts, check_engines, check_names, check_parts
from omni_discovery.deploy.dialect import MOST_PROBLEMS, Overrides, translate, unknown_keys
from omni_discovery.deploy.lines import MOST_LEVELS, Problem, is_too_deep, line_at, load_yaml, without_lines
from omni_discovery.errors import ConfigError
from omni_discovery.inputs.containers import decode_any
from omni_discovery.records.sizes import count_parts

_YES_OR_NO: Final = "true or false"
_WORDS: Final = "a word"
#: What would be right, by the name of the key.
_RIGHT: Final = {
    "final_output": "text, image, audio, video, embedding or none",
    "window_size": BOUND,
    "max_inflight": BOUND,
    "async_chunk": _YES_OR_NO,
    "deterministic": _YES_OR_NO,
    "connector": "the name of one in 'connectors', or a connector's own, as TcpConnector",
    "stage_id": "a whole number from 0",
    "from": "the id of a stage",
    "to": "the id of a stage",
    "input_from": "a list of stage ids, as [0]",
    "num_replicas": "a whole number from 1 to 1024",
    "devices": "a text like '0,1', or cpu",
    "share_devices": _YES_OR_NO,
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
_Config = TypeVar("_Config", bound=msgspec.Struct)
_PLACE: Final = re.compile(r" - at `\$([^`]*)`$")
_STEP: Final = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_LONGEST_VALUE: Final = 60


def _describe(message: str, outer: Sequence[str | int], document: Any) -> Problem:
    """Return a decoder's error message in the document's own terms; unchanged if its place can't be found.

    ``outer`` leads to the part of the document that was decoded, the message's own place leads on from there.
    """
    found = _PLACE.search(message)
    inner = _STEP.findall(found[1]) if found is not None else ()
    steps = [*outer, *(name if name else int(index) if index.isdigit() else index for name, index in inner)]
    if not steps:
        return Problem(message)
    line = line_at(document, steps)
    try:
        place, value = _look_up(document, steps)
    except (KeyError, IndexError, TypeError):
        return Problem(message, line)
    key = steps[-2] if steps[-2:-1] == ["input_from"] else steps[-1]
    if key not in _RIGHT or message.startswith("Object missing"):
        return Problem(f"{place}: {message if found is None else message[: found.start()]}", line)
    return Problem(f"{place} is {short_value(value)}; right would be {_RIGHT[str(key)]}", line)


def _wrong_values(
    kind: Any, value: Any, steps: tuple[str | int, ...], document: Any, others: Sequence[Problem]
) -> Iterator[Problem]:
    """Describe every value at or below ``steps`` that does not fit the type ``kind``; unknown keys are passed over.

    A missing key is passed over, too, if one of ``others`` is about its misspelling.
    """
    try:
        msgspec.convert(value, kind)
        return
    except msgspec.ValidationError as error:
        message = str(error)
    kind = _without_wrapping(kind)
    inner = get_args(kind)
    if _is_struct(kind) and isinstance(value, dict):
        for field in msgspec.structs.fields(kind):
            name = field.encode_name
            if name in value:
                yield from _wrong_values(field.type, value[name], (*steps, name), document, others)
            elif field.required and not (name == "engine" or any(f"mean '{name}'" in each.text for each in others)):
                yield _describe(f"Object missing required field `{name}`", steps, document)
    elif get_origin(kind) is tuple and isinstance(value, list):
        for index, part in enumerate(value):
            yield from _wrong_values(inner[0], part, (*steps, index), document, others)
    elif get_origin(kind) is dict and _is_struct(inner[1]) and isinstance(value, dict):
        for name, part in value.items():
            yield from _wrong_values(inner[1], part, (*steps, name), document, others)
    else:
        yield _describe(message, steps, document)


def _without_wrapping(kind: Any) -> Any:
    """Return the type inside ``Annotated``, the struct of a union; any other type as it is."""
    if get_origin(kind) is Annotated:
        return get_args(kind)[0]
    if get_origin(kind) in (Union, UnionType):
        return next((each for each in get_args(kind) if _is_struct(each) or get_origin(each) is tuple), kind)
    return kind


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _look_up(document: Any, steps: Sequence[str | int]) -> tuple[str, Any]:
    """Return the place that ``steps`` lead to, as people would write it, and the value there."""
    place, value = "", document
    for at, step in enumerate(steps):
        if step == "...":
            # The decoder does not name which of a mapping's values it is.
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
    """Return a value as text for a message, cut after 60 characters."""
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


_StageId = Annotated[int, msgspec.Meta(ge=0, lt=1_000_000_000)]
FinalOutput = Literal["text", "image", "audio", "video", "embedding", "none"]

#: The connector that joins two stages when the document names none for their edge.
DEFAULT_CONNECTOR: Final = "AutoConnector"
#: How many pieces of one request may be under way on an edge that names no ``window_size``.
DEFAULT_WINDOW: Final = 16
_NO_BOUND: Final = 1 << 52


class RayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The resources of one replica in a Ray cluster, as one bundle of the stage's placement group.

    ``num_gpus`` None means as many as the replica's group of devices has if the stage names devices, else 0.
    ``strategy`` is Ray's.
    """

    num_cpus: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    num_gpus: Annotated[float, msgspec.Meta(ge=0)] | None = None
    resources: dict[str, Annotated[float, msgspec.Meta(gt=0)]] = {}
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"


class RuntimeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a stage's local replicas run.

    ``devices``, in the form of CUDA_VISIBLE_DEVICES, is shared out to them, ``cpu`` shows them none; empty, they share
    what the supervisor was shown. Two replicas get the same device only with ``share_devices``. ``python`` is the
    interpreter of an environment of their own, on the host that they run on; without it they run in the supervisor's.
    """

    devices: str = ""
    num_replicas: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    #: Not encoded unless it is set: the release before refuses keys that it does not know.
    share_devices: bool | msgspec.UnsetType = msgspec.UNSET
    ray: RayConfig | msgspec.UnsetType = msgspec.UNSET
    python: Annotated[str, msgspec.Meta(pattern=r"\A/[^\0]*\Z", max_length=4096)] | msgspec.UnsetType = msgspec.UNSET

    @property
    def own_python(self) -> str:
        """The interpreter of the replicas' own; empty for the supervisor's."""
        return "" if self.python is msgspec.UNSET else self.python

    @property
    def on_ray(self) -> RayConfig:
        """The resources of a replica in a Ray cluster, if it runs in one."""
        return RayConfig() if self.ray is msgspec.UNSET else self.ray


class StageConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One stage. ``input_from`` None means the stage before it in the document."""

    stage_id: _StageId
    engine: Annotated[str, msgspec.Meta(min_length=1)]
    model: str = ""
    engine_args: dict[str, Any] = {}
    runtime: RuntimeConfig = RuntimeConfig()
    default_sampling_params: dict[str, Any] = {}
    final_output: FinalOutput = "none"
    input_from: tuple[_StageId, ...] | None = None
    #: Whether its output is a function of input and seed; unset: as its engine says.
    deterministic: bool | msgspec.UnsetType = msgspec.UNSET


class EdgeConfig(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    kw_only=True,
    rename={"from_": "from"},
):
    """One edge of the graph, with the name in ``connectors`` of the connector that carries its hand-offs.

    ``window_size`` bounds the hand-offs of one producer that are not fetched yet, ``max_inflight`` those that are not
    released yet; -1 is no bound. With ``async_chunk`` (None: the pipeline's) the next stage begins on the first piece
    of the hand-off if the engine makes pieces, and ``window_size`` bounds the pieces of each request that the next
    stage has not taken.
    """

    from_: _StageId
    to: _StageId
    connector: str = ""
    window_size: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    max_inflight: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    async_chunk: bool | None = None


class ConnectorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One connector: the ``name`` of its class, built in or an installed package's, and its constructor's ``extra``."""

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
        """Return the stage with that id. Raise ConfigError that lists the known ids."""
        for stage in self.stages:
            if stage.stage_id == stage_id:
                return stage
        known = ", ".join(str(stage.stage_id) for stage in self.stages)
        raise ConfigError(f"stage {stage_id} is not in the pipeline; it has {known}")

    def inputs_of(self, stage_id: int) -> tuple[int, ...]:
        """Return the ids of the stages whose hand-offs a stage takes; empty for the first stage."""
        stage = self.stage(stage_id)
        if stage.input_from is not None:
            return stage.input_from
        position = self.stages.index(stage)
        return (self.stages[position - 1].stage_id,) if position else ()

    def connector_of(self, from_stage: int, to_stage: int) -> ConnectorConfig:
        """Return the connector of an edge, the default if it names none, with the edge's bounds in its ``extra``."""
        edge = self._edge(from_stage, to_stage)
        if edge is None:
            return ConnectorConfig(name=DEFAULT_CONNECTOR)
        found = self.connectors[edge.connector] if edge.connector else ConnectorConfig(name=DEFAULT_CONNECTOR)
        window_size = None if self.async_chunk_of(from_stage, to_stage) else edge.window_size
        bounds = {"window_size": window_size, "max_inflight": edge.max_inflight}
        extra = {**found.extra, **{name: bound for name, bound in bounds.items() if bound is not None}}
        return msgspec.structs.replace(found, extra=extra)

    def async_chunk_of(self, from_stage: int, to_stage: int, wanted: bool | None = None) -> bool:
        """Whether hand-offs travel this edge piece by piece; ``wanted`` is the request's choice, None if it has none.

        A request may turn pieces on, except on an edge with ``async_chunk: false``, and off on every edge.
        """
        edge = self._edge(from_stage, to_stage)
        of_edge = None if edge is None else edge.async_chunk
        if wanted is not None:
            return wanted and of_edge is not False
        return self.async_chunk if of_edge is None else of_edge

    def window_of(self, from_stage: int, to_stage: int) -> int:
        """The greatest number of pieces of one request in flight between two stages, at least 1."""
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
    text: str,
    source: str,
    overrides: Overrides = MappingProxyType({}),
    installed: Collection[str] = (),
    engines: Collection[str] | None = None,
) -> DeployConfig:
    """Read a deploy YAML, ours or one written for vLLM-Omni, and merge ``overrides`` into its stages before any check.

    ``installed`` are connectors of other packages that edges may name directly. Raise ConfigError with the file, the
    places and what would be right; with ``engines``, those of other packages on this host, also with the names of
    engines and connectors that this host does not know. Without another error, these are left to the caller.
    """
    document, problems = parse_mapping(text, source)
    return _read(document, source, overrides, installed, problems, engines)


def parse_mapping(text: str, source: str) -> tuple[dict[str, Any], list[Problem]]:
    """Read the YAML of a document as a mapping whose keys know their lines, and what is wrong with its text.

    Raise ConfigError if the text is no YAML, or no mapping.
    """
    try:
        document, problems = load_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{source}{_where(error, text)}: not YAML: {getattr(error, 'problem', None) or error}"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{source}: not YAML: too many levels") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{source}: a deploy document is a mapping with the key 'stages'")
    return document, problems


def _where(error: yaml.YAMLError, text: str) -> str:
    """Return the line of a syntax error as ``:LINE``; empty if it has none. An error at the end is in the last line."""
    place = getattr(error, "problem_mark", None)
    if place is None:
        return ""
    return f":{min(place.line + 1, max(1, len(text.splitlines())))}"


def read_deploy(
    document: Mapping[str, Any],
    source: str,
    overrides: Overrides = MappingProxyType({}),
    installed: Collection[str] = (),
) -> DeployConfig:
    """Like ``parse_deploy``, of a document that is a mapping already. Raise ConfigError."""
    return _read(document, source, overrides, installed)


def _read(
    document: Mapping[str, Any],
    source: str,
    overrides: Overrides,
    installed: Collection[str],
    problems: Sequence[Problem] = (),
    engines: Collection[str] | None = None,
) -> DeployConfig:
    _check_size(document, source)
    try:
        ours = translate(document, KNOWN_KEYS, overrides, installed)
    except RecursionError as error:
        raise ConfigError(f"{source}: a part of it holds itself") from error
    deploy = convert_document(ours, source, problems, with_engines=True, installed=installed, engines=engines)
    for stage_id in overrides:
        deploy.stage(stage_id)
    return deploy


def decode_deploy(value: bytes, source: str) -> DeployConfig:
    """Decode the JSON document of the registry. Raise ConfigError."""
    _check_bytes(value, source)
    try:
        document = decode_any(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{source}: {error}") from error
    return convert_document(document, source)


def encode_deploy(deploy: DeployConfig) -> bytes:
    """Encode the document as JSON, with the same bytes for the same content.

    Raise ConfigError for one that no hub would read.
    """
    value = msgspec.json.encode(deploy, order="sorted")
    _check_bytes(value, "the deploy document")
    return value


def convert_document(
    document: Any,
    source: str,
    text_problems: Sequence[Problem] = (),
    *,
    with_engines: bool = False,
    installed: Collection[str] = (),
    engines: Collection[str] | None = None,
) -> DeployConfig:
    """Decode and check a document in our own keys. Raise ConfigError with all problems, ``text_problems`` too.

    The engines' arguments are only checked in a document that comes from outside, not in one that is in force.
    ``installed`` and ``engines``: see ``parse_deploy``.
    """
    _check_size(document, source)
    try:
        plain = without_lines(document)
    except RecursionError as error:
        raise ConfigError(f"{source}: {error}") from error
    found, deploy = list(text_problems), None
    if isinstance(document, dict):
        found += unknown_keys(document, KNOWN_KEYS)
    try:
        deploy = msgspec.convert(plain, DeployConfig)
    except msgspec.ValidationError as error:
        found += islice(_wrong_values(DeployConfig, plain, (), document, found), MOST_PROBLEMS)
        found = found or [_describe(str(error), (), document)]
    # Of two lists of stages, which one is meant is not known.
    is_one = not any(problem.text.startswith("stages: ") for problem in text_problems)
    if is_one and isinstance(plain, dict) and isinstance(plain.get("stages"), list):
        parts = _parts_of(plain)
        found += check_parts(parts, document)
        if with_engines:
            found += check_engines(parts, document)
        if found and engines is not None:
            found += check_names(parts, document, engines, installed)
    if deploy is None or found:
        variables = [problem for problem in text_problems if problem.variable]
        raise ConfigError(join_problems(_without_echoes(found, variables), source))
    return deploy


def _without_echoes(problems: Sequence[Problem], variables: Sequence[Problem]) -> list[Problem]:
    """Leave out what is said again of a value that is a variable of a shell."""
    return [
        problem
        for problem in problems
        if problem.variable
        or not any(each.line == problem.line and each.variable in problem.text for each in variables)
    ]


#: How many stages a pipeline may have, how many edges and, together, how many inputs of stages. The checks of what they
#: have wrong together, and those of operators' commands, take longer than in proportion to them.
MOST_STAGES: Final = 256
MOST_EDGES: Final = 1024
#: Bytes of a document as JSON, and parts between its commas and brackets: each hub and supervisor reads it at once.
_MOST_BYTES: Final = 512 << 10
_MOST_PARTS: Final = 1 << 16


def _check_bytes(value: bytes, source: str) -> None:
    if len(value) > _MOST_BYTES or count_parts(value) > _MOST_PARTS:
        raise ConfigError(
            f"{source}: it has {len(value)} bytes as JSON with {count_parts(value)} parts; a pipeline has at most"
            f" {_MOST_BYTES} and {_MOST_PARTS}: make engine_args shorter, or serve it as several"
        )


def _check_size(document: Any, source: str) -> None:
    if is_too_deep(document):
        raise ConfigError(f"{source}: it has more than {MOST_LEVELS} levels, or a part of it holds itself")
    if not isinstance(document, Mapping):
        return
    stages, edges = (_list_of(document, key) for key in ("stages", "edges"))
    connectors = document.get("connectors")
    inputs = sum(len(_list_of(stage, "input_from")) for stage in stages if isinstance(stage, Mapping))
    for name, count, most in (
        ("stages", len(stages), MOST_STAGES),
        ("edges", len(edges), MOST_EDGES),
        ("connectors", len(connectors) if isinstance(connectors, Mapping) else 0, MOST_EDGES),
        ("inputs in 'input_from' of its stages", inputs, MOST_EDGES),
    ):
        if count > most:
            raise ConfigError(f"{source}: it has {count} {name}; a pipeline has at most {most}: serve it as several")


def _list_of(part: Mapping[str, Any], key: str) -> Sequence[Any]:
    found = part.get(key)
    return found if isinstance(found, list | tuple) else ()


def _parts_of(document: Mapping[str, Any]) -> Parts:
    """What can be read of a document with a list of stages, whatever else is wrong with it."""
    edges, connectors = document.get("edges", []), document.get("connectors", {})
    names = None
    # A top-level key that is not known may be the misspelled one of the connectors.
    if isinstance(connectors, dict) and ("connectors" in document or document.keys() <= set(KNOWN_KEYS["document"])):
        names = {
            str(name): str(each.get("name", "")) if isinstance(each, dict) else "" for name, each in connectors.items()
        }
    return Parts(
        [_read_part(StageConfig, stage, {"engine": "?"}) for stage in document["stages"]],
        [_read_part(EdgeConfig, edge, {}) for edge in edges] if isinstance(edges, list) else [],
        names,
    )


def _read_part(kind: type[_Config], value: Any, stand_ins: Mapping[str, Any]) -> Part[_Config] | None:
    """Read the keys of a struct that can be read; None if a required one without a stand-in can't.

    Where a key is not known, those that are missing count as unread: one of them may be meant.
    """
    if not isinstance(value, dict):
        return None
    fields = msgspec.structs.fields(kind)
    strange = value.keys() - {field.encode_name for field in fields}
    read, unread = {}, set()
    for field in fields:
        name = field.encode_name
        try:
            if name in value:
                read[field.name] = msgspec.convert(value[name], field.type)
            elif strange or field.required:
                unread.add(name)
        except msgspec.ValidationError:
            unread.add(name)
        if field.required and field.name not in read:
            if name not in stand_ins:
                return None
            read[field.name] = stand_ins[name]
    return Part(kind(**read), frozenset(unread))


#: The keys that each part of a document may have.
KNOWN_KEYS: Final = {
    "document": DeployConfig.__struct_encode_fields__,
    "stage": StageConfig.__struct_encode_fields__,
    "runtime": RuntimeConfig.__struct_encode_fields__,
    "edge": EdgeConfig.__struct_encode_fields__,
    "connector": ConnectorConfig.__struct_encode_fields__,
}


#: How many problems of one document are listed; of more, the number.
_MOST_LISTED: Final = 20


def join_problems(problems: Sequence[Problem], source: str) -> str:
    """Return one problem as one line, several with a heading and each on a line of its own, in the order of lines."""
    if len(problems) == 1:
        return f"{_place_of(problems[0], source) or f'{source}: '}{problems[0].text}"
    ordered = sorted(problems, key=lambda problem: problem.line)
    lines = [f"\n  {_place_of(problem, source)}{problem.text}" for problem in ordered[:_MOST_LISTED]]
    more = len(problems) - _MOST_LISTED
    return f"{source}: {len(problems)} keys are wrong:{''.join(lines)}" + (f"\n  and {more} more" if more > 0 else "")


def _place_of(problem: Problem, source: str) -> str:
    return f"{source}:{problem.line}: " if problem.line else ""
