"""Translates deploy documents written for vLLM-Omni into our keys, and short forms of ours into the full one. Pure.

Keys with the same meaning are renamed. All others are reported at once, each with its place and what would be right.
Connectors that an edge names directly, or describes in place of a name, are declared under ``connectors``.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any, Final

from omni_discovery.deploy.lines import Problem, line_at, line_of_key, move_key, take_keys
from omni_discovery.plugins import BUILT_IN_CONNECTORS, CONNECTOR_ALIASES

#: The engine whose stages have to know whether the whole pipeline hands over in pieces, and the argument that says it.
VLLM_OMNI: Final = "vllm-omni"
ASYNC_CHUNK: Final = "async_chunk"
#: Problems of one kind that are looked for in a document.
MOST_PROBLEMS: Final = 200
#: The names of connectors that an edge may use without a declaration under ``connectors``.
CONNECTORS: Final = tuple(sorted([*BUILT_IN_CONNECTORS, *CONNECTOR_ALIASES]))


def declare_connectors(document: dict[str, Any], installed: Collection[str] = ()) -> None:
    """Declare under ``connectors`` those that edges name directly: built-in ones and ``installed`` ones of plugins.

    Unknown names stay as they are, for the check of the document to report.
    """
    edges, declared = document.get("edges"), document.get("connectors")
    if not isinstance(edges, list) or not isinstance(declared, dict | None):
        return
    connectors = dict(declared or {})
    changed = [_declare_of_edge(edge, connectors, {*CONNECTORS, *installed}) for edge in edges]
    if connectors != (declared or {}):
        document |= {"edges": changed, "connectors": connectors}


def _name_connector(connector: Any, ends: tuple[Any, Any], connectors: dict[str, Any]) -> Any:
    """Return the connector's name; one described in place of a name is put into ``connectors`` under a new name."""
    if not isinstance(connector, dict):
        return connector
    name = f"from {ends[0]} to {ends[1]}"
    connectors[name] = connector
    return name


def _declare_of_edge(edge: Any, connectors: dict[str, Any], known: Collection[str]) -> Any:
    if not isinstance(edge, dict) or "connector" not in edge:
        return edge
    name = _name_connector(edge["connector"], (edge.get("from"), edge.get("to")), connectors)
    if isinstance(name, str) and name in known:
        connectors.setdefault(name, {"name": name})
    return {**edge, "connector": name}


#: Keys of a stage that name the connectors of its edges.
_END_KEYS: Final = ("input_connectors", "output_connectors")
#: Our key by theirs, for keys whose values are the same.
_STAGE_ALIASES: Final = {"engine_input_source": "input_from", "input_sources": "input_from"}
_STAGE_TYPES: Final = {"llm": "vllm", "diffusion": "diffusion"}
#: Arguments of vLLM that stand beside ``engine_args`` there, and, of some, in the whole document for every stage.
ENGINE_KEYS: Final = frozenset(
    (
        *("async_scheduling", "attention_backend", "attention_config", "block_size", "compilation_config"),
        *("config_format", "data_parallel_size", "disable_hybrid_kv_cache_manager", "distributed_executor_backend"),
        *("dtype", "enable_chunked_prefill", "enable_expert_parallel", "enable_flashinfer_autotune", "enable_lora"),
        *("enable_prefix_caching", "enable_sleep_mode", "enforce_eager", "gpu_memory_utilization", "hf_overrides"),
        *("interleave_mm_strings", "kv_cache_dtype", "kv_cache_dtype_skip_layers", "kv_cache_memory_bytes"),
        *("kv_transfer_config", "limit_mm_per_prompt", "load_format", "logits_processors", "mamba_ssm_cache_dtype"),
        *("max_model_len", "max_num_batched_tokens", "max_num_seqs", "media_io_kwargs", "mm_processor_cache_gb"),
        *("moe_backend", "pipeline_parallel_size", "quantization", "revision", "seed", "skip_mm_profiling"),
        *("skip_tokenizer_init", "tensor_parallel_size", "tokenizer", "tokenizer_mode", "trust_remote_code"),
    )
)
_WIDE_KEYS: Final = (
    *("trust_remote_code", "distributed_executor_backend", "dtype", "quantization", "enable_prefix_caching"),
    *("enable_chunked_prefill", "data_parallel_size", "pipeline_parallel_size"),
)
#: Their key of a stage, by our ``engine_args.pd``.
_ROLE_KEYS: Final = {"prefill": "is_prefill_only", "decode": "is_decode_only"}
_OF_THEIR_MODELS: Final = "vLLM-Omni's own model code reads it; remove it, no engine here has a use for it"
#: Keys of their files without a meaning here, with what to do instead.
_HINTS: Final = {
    "pipeline": "it names stages inside vLLM-Omni; say engine, input_from and final_output of each stage here",
    "base_config": "write the base file's content into this one",
    "platforms": "keep one file for each platform, or use --stage-overrides",
    "env": "set it in the environment of 'omni serve' on the hosts of the stage",
    "max_batch_size": "write engine_args.max_num_seqs",
    "process": "every replica is a process of its own here; remove it",
    "defaults": "write window_size and max_inflight at each edge",
    "default_pooling_params": "send them with the requests",
    "is_comprehension": "hubs pass text through and replicas tokenize; remove it",
    **dict.fromkeys(_ROLE_KEYS.values(), "write engine_args.pd: prefill or engine_args.pd: decode, one of them"),
    "parallel_config": "write tensor_parallel_size and pipeline_parallel_size in engine_args",
    **dict.fromkeys(
        _END_KEYS,
        "right would be {from_stage_N or to_stage_N: the name of a connector}, the same name at both ends",
    ),
    "name": "the model name that clients see is 'model'",
    **dict.fromkeys(
        (
            *("model_stage", "model_arch", "model_class_name", "worker_type"),
            *("engine_output_type", "hf_config_name", "omni_kv_config", "custom_process_input_func", "model_runner"),
            *("custom_process_next_stage_input_func", "prompt_expand_func", "tts_args", "subtalker_sampling_params"),
        ),
        _OF_THEIR_MODELS,
    ),
}
#: Those of ``_HINTS`` that are refused in ``engine_args``, where any other key may be an argument of vLLM.
_NOT_VLLMS: Final = frozenset(
    (*(name for name, hint in _HINTS.items() if hint is _OF_THEIR_MODELS), "parallel_config", *_ROLE_KEYS.values())
)

#: The keys that each part of a document may have, by the names of the parts: document, stage, runtime, edge, connector.
Known = Mapping[str, tuple[str, ...]]
#: The changes of ``--stage-overrides`` by stage id, in our keys.
Overrides = Mapping[int, Mapping[str, Any]]


def translate(
    document: Mapping[str, Any],
    known: Known,
    overrides: Overrides = MappingProxyType({}),
    installed: Collection[str] = (),
) -> dict[str, Any]:
    """Return the document in our own keys, with ``overrides`` merged into its stages.

    ``installed`` are connectors of other packages that edges may name directly. Keys without a meaning here stay in the
    document, for ``unknown_keys`` to report.
    """
    ours = dict(document)
    if "stage_args" in ours and "stages" not in ours:
        move_key(ours, "stage_args", "stages")
    _lift_runtime(ours)
    if not isinstance(ours.get("stages"), list):
        return ours
    wide = take_keys(ours, _WIDE_KEYS)
    in_pieces = ours.get(ASYNC_CHUNK) is True
    ours["stages"] = [
        _translate_whole(stage, known, overrides, wide, in_pieces=in_pieces) if isinstance(stage, dict) else stage
        for stage in ours["stages"]
    ]
    _lift_connectors(ours)
    declare_connectors(ours, installed)
    return ours


def translate_stage(stage: Mapping[str, Any], known: Known) -> dict[str, Any]:
    """Return one stage, or some of its keys, in our own keys."""
    ours = dict(stage)
    for theirs, name in _STAGE_ALIASES.items():
        if theirs in ours and name not in ours:
            move_key(ours, theirs, name)
    engine = _STAGE_TYPES.get(str(ours.get("stage_type")))
    if engine is not None and ours.setdefault("engine", engine) == engine:
        del ours["stage_type"]
    _translate_output(ours)
    _translate_runtime(ours)
    said = take_keys(ours, _ROLE_KEYS.values())
    role = _role_in(said)
    beside = take_keys(ours, [name for name in ours if name in ENGINE_KEYS and name not in known["stage"]])
    if isinstance(ours.get("engine_extras"), dict):
        beside = merged(beside, ours.pop("engine_extras"))
    beside = merged(beside, ours.get("engine_args", {}))
    if role and isinstance(beside, dict) and beside.get("pd", role) == role:
        beside = {**beside, "pd": role}
    elif said and (role or role is None):
        # They stay, to be reported.
        ours |= said
    if beside:
        ours["engine_args"] = beside
    return ours


def _translate_whole(
    stage: Mapping[str, Any], known: Known, overrides: Overrides, wide: Mapping[str, Any], *, in_pieces: bool
) -> dict[str, Any]:
    ours = translate_stage(stage, known)
    stage_id = ours.get("stage_id")
    if isinstance(stage_id, int):
        ours = merged(ours, overrides.get(stage_id, {}))
    if wide and ours.get("engine") == "vllm":
        ours["engine_args"] = merged(dict(wide), ours.get("engine_args", {}))
    if in_pieces and ours.get("engine") == VLLM_OMNI:
        ours["engine_args"] = merged({ASYNC_CHUNK: True}, ours.get("engine_args", {}))
    return ours


def merged(base: Any, over: Any) -> Any:
    """Return ``base`` with ``over`` merged into it: mappings key by key, any other value replaced."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    # A key of ``over`` takes the place of an equal one of ``base``: a value's line is that of its own key.
    keys = {name: name for name in over}
    both = {keys.get(name, name): merged(value, over[name]) if name in over else value for name, value in base.items()}
    return both | {name: value for name, value in over.items() if name not in base}


def unknown_keys(document: Mapping[str, Any], known: Known) -> list[Problem]:
    """Describe each unknown key of a document, with its place and a hint; of very many only the first."""
    problems = _unknown_in("", document, known["document"], "")
    for index, stage in enumerate(_list_of(document.get("stages"))):
        if isinstance(stage, dict):
            place = f"stage {stage['stage_id']}." if "stage_id" in stage else f"stages[{index}]."
            stage = dict(stage)  # noqa: PLW2901 - what is reported is taken out of a copy
            problems += _two_connectors_in(place, stage)
            of_stage = unknown_stage_keys(place, stage, known)
            problems += of_stage
            if "engine" not in stage and not any("'engine'" in problem.text for problem in of_stage):
                missing = (
                    f"{place}engine is missing: say vllm, diffusion, echo or another engine that is installed; a file"
                    " in which no stage says one is vLLM-Omni's and needs MODEL before the flags"
                )
                problems.append(Problem(missing, line_at(document, ("stages", index))))
        if len(problems) >= MOST_PROBLEMS:
            return problems[:MOST_PROBLEMS]
    for index, edge in enumerate(_list_of(document.get("edges"))):
        problems += _unknown_in(f"edges[{index}].", edge, known["edge"], "")
    for name, connector in _mapping_of(document.get("connectors")).items():
        hint = "what its class takes goes in 'extra'"
        problems += _unknown_in(f"connectors.{name}.", connector, known["connector"], hint)
        if len(problems) >= MOST_PROBLEMS:
            break
    return problems[:MOST_PROBLEMS]


def unknown_stage_keys(place: str, stage: Mapping[str, Any], known: Known) -> list[Problem]:
    """Describe each unknown key of one stage; ``place`` is what stands before a key, as ``stage 0.``."""
    roles = tuple(_ROLE_KEYS.values())
    problems = _unknown_in(place, stage, (*known["stage"], *roles), "what its engine takes goes in 'engine_args'")
    problems += _role_problems(place, stage)
    problems += _unknown_in(f"{place}runtime.", stage.get("runtime"), known["runtime"], "")
    arguments = stage.get("engine_args")
    if stage.get("engine", "vllm") == "vllm" and isinstance(arguments, dict):
        refused = [name for name in arguments if name in _NOT_VLLMS]
        problems += [
            Problem(f"{place}engine_args.{name} is not known: {_HINTS[name]}", line_of_key(name)) for name in refused
        ]
    return problems


def _unknown_in(place: str, part: Any, known: tuple[str, ...], otherwise: str) -> list[Problem]:
    if not isinstance(part, dict):
        return []
    return [
        Problem(f"{place}{name} is not known{_hint(str(name), known, otherwise)}", line_of_key(name))
        for name in islice((name for name in part if name not in known), MOST_PROBLEMS)
    ]


def _hint(name: str, known: tuple[str, ...], otherwise: str) -> str:
    if name in _HINTS:
        return f": {_HINTS[name]}"
    if near := difflib.get_close_matches(name, known, n=1):
        return f" (did you mean '{near[0]}'?)"
    return f": {otherwise or 'there are ' + ', '.join(known)}"


def _translate_output(stage: dict[str, Any]) -> None:
    """Turn ``final_output: true`` with a ``final_output_type`` into our ``final_output: <type>``."""
    final = stage.get("final_output")
    if final is False:
        stage["final_output"] = "none"
        stage.pop("final_output_type", None)
    elif "final_output_type" in stage and (final is True or final is None):
        stage.pop("final_output", None)
        move_key(stage, "final_output_type", "final_output")


def _role_in(said: Mapping[str, Any]) -> str | None:
    """Return the role of ``is_prefill_only`` and ``is_decode_only``, empty for none; None if they are wrong."""
    roles = [role for role, key in _ROLE_KEYS.items() if said.get(key) is True]
    if len(roles) > 1 or any(not isinstance(value, bool) for value in said.values()):
        return None
    return roles[0] if roles else ""


def _role_problems(place: str, stage: Mapping[str, Any]) -> list[Problem]:
    """Describe the keys of a stage's role that ``translate_stage`` has left because they are wrong."""
    said = {name: stage[name] for name in stage if name in _ROLE_KEYS.values()}
    wrong = {name: value for name, value in said.items() if not isinstance(value, bool)}
    if wrong:
        return [
            Problem(f"{place}{name} is {value!r}; right would be true or false", line_of_key(name))
            for name, value in wrong.items()
        ]
    names = [name for name, value in said.items() if value]
    if not names:
        return []
    other = names[1] if len(names) > 1 else f"engine_args.pd: {_mapping_of(stage.get('engine_args')).get('pd')}"
    text = f"{place}{names[0]} stands beside {other}; a stage has one role: {_HINTS[names[0]]}"
    return [Problem(text, line_of_key(names[0]))]


def _translate_runtime(stage: dict[str, Any]) -> None:
    runtime = stage.get("runtime", {})
    if not isinstance(runtime, dict):
        return
    runtime = {**take_keys(stage, ("devices", "num_replicas")), **runtime}
    if runtime.get("process") is True:
        del runtime["process"]
    devices = runtime.get("devices")
    if isinstance(devices, int) and not isinstance(devices, bool):
        runtime["devices"] = str(devices)
    elif isinstance(devices, list):
        runtime["devices"] = ",".join(str(device) for device in devices)
    elif devices is None:
        runtime.pop("devices", None)
    if runtime.get("share_devices") is False:
        del runtime["share_devices"]
    if runtime or "runtime" in stage:
        stage["runtime"] = runtime


def _lift_runtime(document: dict[str, Any]) -> None:
    """Move ``connectors`` and ``edges`` up from a ``runtime`` of the whole document, where older files have them."""
    runtime = document.get("runtime")
    if not isinstance(runtime, dict):
        return
    rest = dict(runtime)
    for name in ("connectors", "edges"):
        if name in rest and name not in document:
            document |= take_keys(rest, (name,))
    if rest.get("enabled") is True:
        del rest["enabled"]
    if rest:
        document["runtime"] = rest
    else:
        del document["runtime"]


def _lift_connectors(document: dict[str, Any]) -> None:
    """Turn ``input_connectors: {from_stage_0: name}`` of a stage into the connector of the edge from 0 to it."""
    connectors = dict(_mapping_of(document.get("connectors")))
    edges = [dict(edge) if isinstance(edge, dict) else edge for edge in _list_of(document.get("edges"))]
    found = False
    #: Where the connector of an edge was named first, by its ends.
    told: dict[tuple[int, int], str] = {}
    for stage in document["stages"]:
        if not isinstance(stage, dict) or not isinstance(stage.get("stage_id"), int):
            continue
        for key, prefix in zip(_END_KEYS, ("from_stage_", "to_stage_"), strict=True):
            names = dict(_mapping_of(stage.get(key)))
            for name in [name for name in names if _ends_in_number(str(name), prefix)]:
                found = True
                other = int(name.removeprefix(prefix))
                ends = (other, stage["stage_id"]) if prefix == "from_stage_" else (stage["stage_id"], other)
                edge = _edge_between(ends, edges)
                former = edge.get("connector")
                if former is None or _are_alike(former, names[name], connectors):
                    edge["connector"] = _name_connector(names[name], ends, connectors)
                    told.setdefault(ends, f"stage {stage['stage_id']}.{key}")
                    del names[name]
                else:
                    # The key stays, and is reported.
                    both = (_shown_name(names[name], connectors), _shown_name(former, connectors))
                    names[name] = _TwoConnectors(ends, *both, told.get(ends, "edges"))
            if names:
                stage[key] = names
            elif isinstance(stage.get(key), dict):
                del stage[key]
    if found:
        document |= {"edges": edges, "connectors": connectors}


@dataclass(frozen=True, slots=True)
class _TwoConnectors:
    """Stands in the place of a connector that differs from what ``first`` has named for the same edge."""

    ends: tuple[int, int]
    here: str
    there: str
    first: str


def _are_alike(former: Any, connector: Any, connectors: Mapping[str, Any]) -> bool:
    """Whether both ends mean one connector: the same name, or descriptions of one class, of which the later holds."""
    is_described = isinstance(former, dict) or (former in connectors and str(former).startswith("from "))
    if is_described != isinstance(connector, dict):
        return False
    return _shown_name(former, connectors) == _shown_name(connector, connectors)


def _shown_name(connector: Any, connectors: Mapping[str, Any]) -> str:
    """The name of a connector: of one that stands in an edge, or that was put into ``connectors``, its class."""
    if isinstance(connector, str) and connector.startswith("from "):
        connector = connectors.get(connector, connector)
    return str(connector.get("name") if isinstance(connector, dict) else connector)


def _two_connectors_in(place: str, stage: dict[str, Any]) -> list[Problem]:
    """Describe the edges whose ends name different connectors, and take them out of the stage."""
    problems = []
    for key in _END_KEYS:
        names = _mapping_of(stage.get(key))
        wrong = {name: each for name, each in names.items() if isinstance(each, _TwoConnectors)}
        for name, each in wrong.items():
            text = (
                f"{place}{key} names connector {each.here!r} for the edge from {each.ends[0]} to {each.ends[1]}, and"
                f" {each.first} names {each.there!r}; right would be the same at both ends"
            )
            problems.append(Problem(text, line_of_key(name)))
        if wrong and len(wrong) == len(names):
            del stage[key]
        elif wrong:
            stage[key] = {name: each for name, each in names.items() if name not in wrong}
    return problems


def _edge_between(ends: tuple[int, int], edges: list[Any]) -> dict[str, Any]:
    for edge in edges:
        if isinstance(edge, dict) and (edge.get("from"), edge.get("to")) == ends:
            return edge
    edges.append({"from": ends[0], "to": ends[1]})
    added: dict[str, Any] = edges[-1]
    return added


def _list_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping_of(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _ends_in_number(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and name.removeprefix(prefix).isdecimal()
