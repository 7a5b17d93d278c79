"""What a deploy document from etcd asks of a host, beyond what that host has allowed. Pure.

Open are the built-in engines, with settings, for models of a model hub and of this host's model roots. Whatever is not
known to be open is closed: a key that a later version adds, an argument of a later vLLM.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from omni_discovery.deploy.document import (
    ConnectorConfig,
    DeployConfig,
    EdgeConfig,
    RayConfig,
    RuntimeConfig,
    StageConfig,
)
from omni_discovery.deploy.trust.bounds import Bounds, is_below
from omni_discovery.deploy.trust.connector_settings import is_open
from omni_discovery.deploy.trust.vllm_args import (
    MODELS,
    MODELS_OR_CODE,
    OWN_OF_OMNI,
    PARTS,
    PICKLED_FORMATS,
    PICKLED_METHODS,
    REVISIONS,
    WORDS_OF_OMNI,
    is_numbers,
    is_plain,
    is_revision,
    is_setting,
    is_text,
)
from omni_discovery.errors import ConfigError
from omni_discovery.plugins import BUILT_IN_CONNECTORS, BUILT_IN_ENGINES, CONNECTOR_ALIASES
from omni_discovery.text import is_shown

#: Where a model's text leads on this host: the paths that it stands for, as written and with all links followed.
#: Empty for the name of a model on a model hub.
Locate = Callable[[str], tuple[str, ...]]

_MODEL_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?")
#: The keys of a document that have a rule below, or that only name, join and count. A test holds them against the
#: document's own: a new key stays closed until somebody decides what it may be.
JUDGED: Final[Mapping[type[msgspec.Struct], frozenset[str]]] = {
    DeployConfig: frozenset(("stages", "model", "edges", "connectors", "async_chunk")),
    StageConfig: frozenset(
        (
            *("stage_id", "engine", "model", "engine_args", "runtime", "default_sampling_params", "final_output"),
            *("input_from", "deterministic"),
        )
    ),
    RuntimeConfig: frozenset(("devices", "num_replicas", "share_devices", "ray", "python")),
    RayConfig: frozenset(("num_cpus", "num_gpus", "resources", "strategy")),
    EdgeConfig: frozenset(("from_", "to", "connector", "window_size", "max_inflight", "async_chunk")),
    ConnectorConfig: frozenset(("name", "extra")),
}
#: Engines whose arguments are vLLM's, but for some of their own.
_OF_VLLM: Final = ("vllm", "vllm-omni")
#: Engine arguments, with settings as values, of the other built-in engines. Those of ``echo`` fail or wait on purpose.
_ENGINE_ARGS: Final[Mapping[str, frozenset[str]]] = {
    "echo": frozenset(
        (
            *("capacity", "modality", "delay_s", "load_s", "payload_bytes", "fail_on", "crash_on", "kill_on"),
            *("hang_on", "handoff_on", "control_delay_s", "allow_rpc", "random", "tool_call_parser"),
        )
    ),
    "diffusion": frozenset(
        (
            *("capacity", "device", "dtype", "height_px", "allow_download", "revision", "leave_out", "max_side_px"),
            "call_args",
        )
    ),
}
_LONGEST_VALUE: Final = 80
_PYTHON: Final = "runtime.python"


@dataclass(frozen=True, slots=True)
class Closed:
    """Something that a document asks for and this host has not allowed: where, what, and the flag that opens it."""

    place: str
    reason: str
    flag: str


def check_document(deploy: DeployConfig, stage_id: int, bounds: Bounds, locate: Locate) -> None:
    """Raise ConfigError if a document asks for more than this host allows, with the flags that would allow it."""
    if bounds.trusts(deploy):
        return
    try:
        found = list(dict.fromkeys(closed_in(deploy, stage_id, bounds, locate)))
    except RecursionError as error:
        raise refusal(stage_id, "engine_args has more levels than can be judged", "--allow all") from error
    if found:
        flags = " ".join(dict.fromkeys(each.flag for each in found))
        told = "; ".join(f"{each.place} {each.reason}" for each in found)
        raise refusal(stage_id, told, flags)


def refusal(stage_id: int, told: str, flags: str) -> ConfigError:
    """The error for a document that asks for more than this host allows."""
    return ConfigError(
        f"stage {stage_id}: the pipeline in etcd asks for what this host has not allowed: {told}. "
        f"If you trust who writes it, allow it here: {flags}"
    )


def within(stage: StageConfig, bounds: Bounds) -> StageConfig:
    """A stage that passed ``check_document``, with what vLLM would else decide by what it finds."""
    formats = stage.engine_args.get("load_format", "auto")
    if stage.engine not in _OF_VLLM or formats != "auto" or bounds.allows("pickled-weights"):
        return stage
    # By itself vLLM would read pickled weights where there are no others.
    return msgspec.structs.replace(stage, engine_args={**stage.engine_args, "load_format": "safetensors"})


def closed_in(deploy: DeployConfig, stage_id: int, bounds: Bounds, locate: Locate) -> Iterator[Closed]:
    """Everything in a stage and in its edges' connectors that this host has not allowed."""
    stage = deploy.stage(stage_id)
    for where, part in (
        ("", deploy),
        *(("edges.", edge) for edge in deploy.edges),
        *(("connectors.", connector) for connector in deploy.connectors.values()),
        ("", stage),
        ("runtime.", stage.runtime),
        ("runtime.ray.", stage.runtime.on_ray),
    ):
        yield from _closed_keys(part, where, bounds)
    if (python := stage.runtime.own_python) and not bounds.allows("key", _PYTHON):
        yield Closed(_PYTHON, f"is a program of this host: {_short(python)}", _allow("key", _PYTHON))
    yield from _closed_model("model", stage.model, bounds, locate)
    yield from _closed_adapter(stage.default_sampling_params, bounds, locate)
    yield from _closed_engine(stage, bounds, locate)
    for name, extra in _connectors_of(deploy, stage_id):
        yield from _closed_connector(name, extra, bounds)


def model_texts(deploy: DeployConfig, stage_id: int) -> tuple[str, ...]:
    """The texts of a stage that name a model, a tokenizer, a draft or an adapter."""
    found: dict[str, None] = {}

    def note(text: str) -> tuple[str, ...]:
        found[text] = None
        return ()

    with suppress(RecursionError):
        list(closed_in(deploy, stage_id, Bounds(), note))
    return tuple(found)


def _closed_engine(stage: StageConfig, bounds: Bounds, locate: Locate) -> Iterator[Closed]:
    if stage.engine not in BUILT_IN_ENGINES:
        if not bounds.allows("engine", stage.engine):
            yield Closed("engine", f"{stage.engine!r} is another package's", _allow("engine", stage.engine))
    elif stage.engine == "torch":
        yield from _closed_target(stage.engine_args.get("target"), bounds)
    elif stage.engine in _OF_VLLM:
        is_omni = stage.engine == "vllm-omni"
        for name, value in stage.engine_args.items():
            is_own = (name in OWN_OF_OMNI and is_numbers(value)) or (name in WORDS_OF_OMNI and is_plain(value))
            if not (is_omni and is_own):
                yield from _closed_vllm(name, value, bounds, locate)
    else:
        for name, value in stage.engine_args.items():
            is_right = is_revision(value) if name in REVISIONS else is_text(value) or is_numbers(value)
            if name not in _ENGINE_ARGS.get(stage.engine, ()) or not is_right:
                yield from _closed_argument(name, value, bounds)


def _closed_keys(part: msgspec.Struct, where: str, bounds: Bounds) -> Iterator[Closed]:
    """Keys that this module has no rule for."""
    for field in msgspec.structs.fields(part):
        usual = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        is_set = getattr(part, field.name) not in (usual, msgspec.UNSET)
        place = f"{where}{field.name}"
        if field.name not in JUDGED[type(part)] and is_set and not bounds.allows("key", place):
            yield Closed(place, "has no bounds yet", _allow("key", place))


def _closed_model(place: str, text: Any, bounds: Bounds, locate: Locate) -> Iterator[Closed]:
    if not isinstance(text, str):
        yield Closed(place, f"is no text: {_short(text)}", "--allow all")
        return
    if not text or bounds.allows("model", text):
        return
    paths = locate(text)
    if not paths:
        if not _MODEL_NAME.fullmatch(text):
            reason = f"is neither a name on a model hub nor a folder: {_short(text)}"
            yield Closed(place, reason, _allow("model", text))
        return
    if not any(is_under(path, root) for path in paths for root in bounds.model_roots):
        roots = ", ".join(bounds.model_roots) or "none"
        yield Closed(
            place,
            f"lies outside of this host's model roots ({roots}): {_short(text)}",
            # A root of "/" would open all files of this host.
            _allow("model", text) if paths[0] == "/" else f"--model-root {_quoted(paths[0])}",
        )


def is_under(path: str, root: str) -> bool:
    """Whether a path is a folder, or lies below it."""
    return path == root or path.startswith(root.rstrip("/") + "/")


def _closed_adapter(params: Mapping[str, Any], bounds: Bounds, locate: Locate) -> Iterator[Closed]:
    adapter = params.get("lora")
    if isinstance(adapter, Mapping) and "path" in adapter:
        yield from _closed_model("default_sampling_params.lora.path", adapter["path"], bounds, locate)


def _closed_target(target: Any, bounds: Bounds) -> Iterator[Closed]:
    module = target.partition(":")[0] if isinstance(target, str) else ""
    if bounds.allows("target", module) or is_below(module, bounds.allowed_modules()):
        return
    flag = _allow("target", module) if module else "--allow all"
    yield Closed("engine_args.target", f"names code: {_short(target)}", flag)


def _closed_vllm(name: str, value: Any, bounds: Bounds, locate: Locate) -> Iterator[Closed]:
    """An argument of vLLM, or a key of one: ``speculative_config.model``."""
    if bounds.allows("engine-arg", name.partition(".")[0]):
        return
    kind = _KINDS.get(name)
    if kind is not None and kind.opens(value):
        if not bounds.allows(kind.allow):
            yield Closed(f"engine_args.{name}", f"{_short(value)} {kind.reason}", f"--allow {kind.allow}")
    elif name in MODELS or (name == "generation_config" and not is_setting(name, value)):
        for each in value.values() if isinstance(value, Mapping) else (value,):
            if each is not None:
                yield from _closed_model_of_vllm(name, each, bounds, locate)
    elif name in PARTS and isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _closed_vllm(f"{name}.{key}", inner, bounds, locate)
    elif not (is_setting(name, value) or (name in _KINDS and value in (None, False))):
        yield from _closed_argument(name, value, bounds)


def _closed_model_of_vllm(name: str, value: Any, bounds: Bounds, locate: Locate) -> Iterator[Closed]:
    place = f"engine_args.{name}"
    if name in MODELS_OR_CODE and isinstance(value, str) and "." in value and "/" not in value:
        yield Closed(place, f"names code: {_short(value)}", _allow("engine-arg", name.partition(".")[0]))
    else:
        yield from _closed_model(place, value, bounds, locate)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Values of an argument of vLLM that a plain kind of ``--allow`` opens."""

    allow: str
    opens: Callable[[Any], bool]
    reason: str


_PICKLED: Final = "reads pickled weights, which can run code"
_KINDS: Final = {
    "trust_remote_code": _Kind("remote-code", bool, "runs code that came with the model"),
    "load_format": _Kind(
        "pickled-weights", lambda value: isinstance(value, str) and value in PICKLED_FORMATS, _PICKLED
    ),
    "quantization": _Kind(
        "pickled-weights", lambda value: isinstance(value, str) and value in PICKLED_METHODS, _PICKLED
    ),
}


def _is_among(value: Any, words: frozenset[str]) -> bool:
    return isinstance(value, str) and value in words


def _closed_argument(name: str, value: Any, bounds: Bounds) -> Iterator[Closed]:
    outermost = name.partition(".")[0]
    if not bounds.allows("engine-arg", outermost):
        reason = f"is not known to be a mere setting: {_short(value)}"
        yield Closed(f"engine_args.{name}", reason, _allow("engine-arg", outermost))


def _connectors_of(deploy: DeployConfig, stage_id: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for stage in deploy.stages:
        for before in deploy.inputs_of(stage.stage_id):
            if stage_id in (before, stage.stage_id):
                found = deploy.connector_of(before, stage.stage_id)
                yield found.name, found.extra


def _closed_connector(name: str, extra: Mapping[str, Any], bounds: Bounds) -> Iterator[Closed]:
    connector = CONNECTOR_ALIASES.get(name, name)
    if connector not in BUILT_IN_CONNECTORS:
        if not bounds.allows("connector", name):
            yield Closed("connectors", f"{name!r} is another package's", _allow("connector", name))
        return
    for key, value in extra.items():
        place = f"connectors.{key}"
        if not is_open(connector, key, value) and not bounds.allows("key", place):
            # The value is not told: it may be a token.
            yield Closed(place, f"of {name} is this host's to decide", _allow("key", place))


def _allow(kind: str, value: str) -> str:
    return f"--allow {_quoted(f'{kind}={value}')}"


def _quoted(text: str) -> str:
    # What is no text for a terminal can't be copied from one, either.
    return shlex.quote(text) if is_shown(text) else ascii(text)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
