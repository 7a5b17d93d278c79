"""The edges of a document by themselves: stages by their ids, and the connectors that join them. Pure.

Reads also documents whose stages nothing here could run, those written for vLLM-Omni for example, as long as what they
say of edges and connectors is right. What a replica reads of a whole document is the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from omni_discovery.deploy.dialect import merged, translate
from omni_discovery.deploy.document import KNOWN_KEYS, DeployConfig, convert_document
from omni_discovery.deploy.lines import Problem, without_lines
from omni_discovery.errors import ConfigError

#: The key of the file that a document of vLLM-Omni changes.
BASE: Final = "base_config"
#: What stands for the engine and the output of each stage, which are not read.
_ANY_STAGE: Final = {"engine": "any", "final_output": "text"}
_STAGE_LISTS: Final = ("stages", "stage_args")
_OF_EDGES: Final = ("edges", "connectors", "async_chunk")
#: The last two are there only if the two ends of an edge name different connectors, which is an error.
_OF_STAGE: Final = ("stage_id", "input_from", "input_connectors", "output_connectors")


def read_edges(
    document: Mapping[str, Any], source: str, installed: Collection[str] = (), problems: Sequence[Problem] = ()
) -> DeployConfig:
    """Read the edges of a document, given as a mapping; ``problems`` are those of its text, if it comes from a file.

    ``installed`` are connectors of other packages that edges may name. Raise ConfigError with ``source``, the places
    and what would be right.
    """
    whole = dict(document)
    if BASE in whole:
        raise ConfigError(f"{source}: {BASE} names a file beside this one, and this is none: merge the two before")
    if not any(name in whole for name in _STAGE_LISTS):
        whole["stages"] = []
    try:
        ours = translate(whole, KNOWN_KEYS, installed=installed)
    except RecursionError as error:
        raise ConfigError(f"{source}: a part of it holds itself") from error
    found = {name: value for name, value in ours.items() if name in ("stages", *_OF_EDGES)}
    edges = found.get("edges")
    if isinstance(edges, list):
        edges = [_with_numbers(edge) for edge in edges]
        found |= {"edges": edges}
    if isinstance(found.get("stages"), list):
        found |= {"stages": _stages(found["stages"], edges if isinstance(edges, list) else [])}
    if found["stages"] == []:
        return DeployConfig(stages=())
    return convert_document(found, source, [each for each in problems if not each.variable or _is_of_edges(each)])


def overlaid(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """The document ``over``, a file with ``base_config``, on top of the document that it names.

    Mappings are merged key by key, stages by their ids; any other value replaces the base's. Lines are those of
    ``over``.
    """
    below = without_lines(dict(base))
    above = {name: value for name, value in over.items() if name != BASE}
    both: dict[str, Any] = merged(below, above)
    for name in _STAGE_LISTS:
        if isinstance(below.get(name), list) and isinstance(above.get(name), list):
            both[name] = _overlaid_stages(below[name], above[name])
    return both


def _overlaid_stages(below: list[Any], above: list[Any]) -> list[Any]:
    changes: dict[int | None, Any] = {_id_of(stage): stage for stage in above}
    ids = {_id_of(stage) for stage in below} - {None}
    changed = [merged(stage, changes.get(_id_of(stage), {})) if _id_of(stage) in ids else stage for stage in below]
    return changed + [stage for stage in above if _id_of(stage) not in ids]


def _id_of(stage: Any) -> int | None:
    number = stage.get("stage_id") if isinstance(stage, dict) else None
    return number if isinstance(number, int) else None


def _with_numbers(edge: Any) -> Any:
    """The edge with ids that are numbers; connectors are asked for by the ids as text."""
    if not isinstance(edge, dict):
        return edge
    return {
        name: int(value) if name in ("from", "to") and isinstance(value, str) and value.isdecimal() else value
        for name, value in edge.items()
    }


def _stages(stages: list[Any], edges: list[Any]) -> list[Any]:
    """The ids and inputs of the stages, and of those that only edges name.

    A stage that says no inputs has those of the edges that end there; without any, the stage before it.
    """
    known = {_id_of(stage) for stage in stages}
    inputs: dict[int, list[int]] = {}
    for edge in edges:
        if isinstance(edge, dict) and isinstance(edge.get("from"), int) and isinstance(edge.get("to"), int):
            inputs.setdefault(edge["to"], []).append(edge["from"])
    more = {end for after, before in inputs.items() for end in (after, *before) if end not in known}
    return [_stage(stage, inputs) for stage in stages] + [
        _stage({"stage_id": number, "input_from": []}, inputs) for number in sorted(more)
    ]


def _stage(stage: Any, inputs: Mapping[int, list[int]]) -> Any:
    if not isinstance(stage, dict):
        return stage
    kept = {name: value for name, value in stage.items() if name in _OF_STAGE} | _ANY_STAGE
    number, said = _id_of(stage), kept.get("input_from")
    by_edges = [] if number is None else inputs.get(number, [])
    if said is None or isinstance(said, list):
        wanted = [*(said or []), *(each for each in by_edges if each not in (said or []))]
        if said is not None or wanted:
            kept["input_from"] = wanted
    return kept


def _is_of_edges(problem: Problem) -> bool:
    place = problem.text.partition(": ")[0]
    return any(name in place for name in ("edges", "connectors"))
