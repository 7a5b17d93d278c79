"""What the parts of a deploy document have wrong together: ids, inputs, edges, names, arguments of engines. Pure.

The checks take the parts that can be read and what is not known of them, so that one error does not hide the others;
where an error elsewhere leaves open whether something is wrong, nothing is said of it.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from omni_discovery.deploy.dialect import CONNECTORS
from omni_discovery.deploy.engine_args import EngineProblem, argument_problems, pair_problems
from omni_discovery.deploy.lines import Problem, line_at
from omni_discovery.plugins import BUILT_IN_ENGINES

if TYPE_CHECKING:
    from omni_discovery.deploy.document import EdgeConfig, StageConfig

Config = TypeVar("Config")

#: What would be right for the bound of an edge.
BOUND: Final = "a whole number from 1, or -1 for no bound"
#: The keys of stages that pairs of prefill and decode hang on.
_OF_PAIRS: Final = frozenset(("engine", "engine_args", "input_from"))


@dataclass(frozen=True, slots=True)
class Part(Generic[Config]):
    """One stage or edge as far as it can be read. A key in ``unread`` holds its default, whatever the file says."""

    config: Config
    unread: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Parts:
    """What can be read of a document: stages and edges by their places, None for one whose ids are not known.

    ``connectors`` are the classes of declared connectors by the connectors' names, None if those are not known.
    """

    stages: Sequence[Part[StageConfig] | None]
    edges: Sequence[Part[EdgeConfig] | None]
    connectors: dict[str, str] | None

    @property
    def ids(self) -> list[int]:
        """The ids of the stages that can be read."""
        return [stage.config.stage_id for stage in self.stages if stage is not None]

    @property
    def has_all_ids(self) -> bool:
        """Whether it is known for certain which ids there are."""
        return None not in self.stages and len(set(self.ids)) == len(self.ids)

    def inputs_of(self, index: int) -> tuple[int, ...] | None:
        """The stages that the stage at a place takes input from; None if that is not known."""
        stage = self.stages[index]
        if stage is None or "input_from" in stage.unread:
            return None
        if stage.config.input_from is not None or index == 0:
            return stage.config.input_from or ()
        before = self.stages[index - 1]
        return None if before is None else (before.config.stage_id,)


def check_parts(parts: Parts, document: Any) -> Iterator[Problem]:
    """Describe what stages and edges have wrong together, with lines of ``document``."""
    if not parts.stages:
        yield Problem("'stages' is empty; a pipeline needs at least one", line_at(document, ("stages",)))
        return
    yield from _check_ids(parts, document)
    read = [stage for stage in parts.stages if stage is not None and "final_output" not in stage.unread]
    if len(read) == len(parts.stages) and all(stage.config.final_output == "none" for stage in read):
        text = "no stage has a final_output; set one to text, image, audio, video or embedding"
        yield Problem(text, line_at(document, ("stages",)))
    yield from _check_order(parts, document)
    for index, edge in enumerate(parts.edges):
        if edge is not None:
            yield from _check_edge(parts, edge.config, index, document)


def check_engines(parts: Parts, document: Any) -> Iterator[Problem]:
    """Describe what is wrong with the arguments of the stages' engines, as far as the document alone shows it."""
    stages = [stage.config if stage is not None else None for stage in parts.stages]
    for index, config in enumerate(stages):
        for found in argument_problems(config) if config is not None else ():
            yield Problem(found.text, _line_of_argument(found, index, document))
    inputs = [parts.inputs_of(index) for index in range(len(stages))]
    is_known = all(stage is not None and not stage.unread & _OF_PAIRS for stage in parts.stages)
    if not (parts.has_all_ids and is_known):
        return
    by_id = {stage_id: before or () for stage_id, before in zip(parts.ids, inputs, strict=True)}
    for found in pair_problems([each for each in stages if each is not None], by_id):
        text = found.text
        if found.other is not None and (line := _line_of_argument(found, parts.ids.index(found.other), document)):
            text += f" (stage {found.other}: line {line})"
        yield Problem(text, _line_of_argument(found, parts.ids.index(found.stage_id), document))


def check_names(
    parts: Parts, document: Any, engines: Collection[str], connectors: Collection[str]
) -> Iterator[Problem]:
    """Describe the engines and connectors that are neither built in nor among those that this host has installed."""
    for index, stage in enumerate(parts.stages):
        if stage is not None and "engine" not in stage.unread and (doubt := doubt_of_engine(stage.config, engines)):
            yield Problem(doubt, line_at(document, ("stages", index, "engine")))
    known = sorted({*CONNECTORS, *connectors})
    for name, kind in (parts.connectors or {}).items():
        if kind and kind not in known:
            text = f"connectors.{name}: connector {kind!r} is not known on this host; {nearest(kind, known)}"
            yield Problem(text, line_at(document, ("connectors", name, "name")))


def doubt_of_engine(stage: StageConfig, installed: Collection[str]) -> str:
    """Describe a stage's engine that is neither built in nor ``installed`` on this host; empty for one that is."""
    known = sorted({*BUILT_IN_ENGINES, *installed})
    if stage.engine in known:
        return ""
    return f"stage {stage.stage_id}: engine {stage.engine!r} is not known on this host; {nearest(stage.engine, known)}"


def nearest(name: str, known: Sequence[str]) -> str:
    """Return a hint for a name that is not among the ``known``: the nearest of them, or all."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"


def _check_ids(parts: Parts, document: Any) -> Iterator[Problem]:
    first: dict[int, int] = {}
    for index, stage in enumerate(parts.stages):
        if stage is None:
            continue
        stage_id = stage.config.stage_id
        if stage_id in first:
            there = line_at(document, ("stages", first[stage_id], "stage_id"))
            known = f"; the first one is in line {there}" if there else f"; the stages have {parts.ids}"
            line = line_at(document, ("stages", index, "stage_id"))
            yield Problem(f"stage_id {stage_id} appears twice{known}: give one of the two another id", line)
        first.setdefault(stage_id, index)


def _check_order(parts: Parts, document: Any) -> Iterator[Problem]:
    seen: Counter[int] = Counter()
    for index, stage in enumerate(parts.stages):
        if stage is None:
            continue
        for before in parts.inputs_of(index) or ():
            # With two equal ids, or one that can't be read, only a stage that is there can be in the wrong place.
            if not seen[before] and (parts.has_all_ids or _is_missing(before, parts)):
                yield Problem(
                    f"stage {stage.config.stage_id} takes input from stage {before}, which does not stand before it",
                    line_at(document, ("stages", index, "input_from")),
                )
        seen[stage.config.stage_id] += 1


def _is_missing(stage_id: int, parts: Parts) -> bool:
    """Whether no stage has that id, for certain."""
    return None not in parts.stages and stage_id not in parts.ids


def _check_edge(parts: Parts, edge: EdgeConfig, index: int, document: Any) -> Iterator[Problem]:
    place = f"the edge {edge.from_} to {edge.to}"
    missing = [f"stage {end}" for end in dict.fromkeys((edge.from_, edge.to)) if _is_missing(end, parts)]
    if missing:
        text = f"{place} joins no two stages of the pipeline: there is no {' and no '.join(missing)}"
        yield Problem(text, line_at(document, ("edges", index)))
    elif parts.has_all_ids:
        inputs = parts.inputs_of(parts.ids.index(edge.to))
        if inputs is not None and edge.from_ not in inputs:
            yield Problem(f"{place} joins no two stages of the pipeline", line_at(document, ("edges", index)))
    if edge.connector and parts.connectors is not None and edge.connector not in parts.connectors:
        known = ", ".join([*sorted(parts.connectors), *CONNECTORS])
        yield Problem(
            f"{place} wants connector {edge.connector!r}; there are: {known}",
            line_at(document, ("edges", index, "connector")),
        )
    for name, bound in (("window_size", edge.window_size), ("max_inflight", edge.max_inflight)):
        if bound == 0:
            line = line_at(document, ("edges", index, name))
            yield Problem(f"{place}: {name} is 0; right would be {BOUND}", line)


def _line_of_argument(found: EngineProblem, index: int, document: Any) -> int:
    return line_at(document, ("stages", index, "engine_args", *found.place.split(".")))
