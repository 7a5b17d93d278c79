"""The stage graph of a deploy document, and which part of it one request needs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omni_discovery.deploy.document import DeployConfig
from omni_discovery.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """The stages that one request walks through."""

    #: Stage ids in an order where every stage comes after its inputs.
    stages: tuple[int, ...]
    #: For each stage, the stages whose hand-off it takes; all of them are in ``stages``.
    inputs: Mapping[int, tuple[int, ...]]
    #: For each stage, the stages of this plan that take its hand-off.
    next_stages: Mapping[int, tuple[int, ...]]
    #: For each stage whose output the client wants, the modality of it.
    finals: Mapping[int, str]
    #: For each edge whose hand-offs travel in pieces: how many pieces may be unacknowledged.
    windows: Mapping[tuple[int, int], int] = field(default_factory=dict)

    def pieces_to(self, stage_id: int) -> tuple[int, ...]:
        """The stages that take a stage's hand-off in pieces."""
        return tuple(after for after in self.next_stages[stage_id] if (stage_id, after) in self.windows)

    def keeps_pace(self, stage_id: int) -> bool:
        """Whether a stage pauses where the client is behind: the client, or such a stage by pieces, gets its output."""
        reached, left = {stage_id}, [stage_id]
        while left:
            stage = left.pop()
            if stage in self.finals:
                return True
            more = [after for after in self.pieces_to(stage) if after not in reached]
            reached.update(more)
            left += more
        return False


class StageGraph:
    """Stages and edges of one deploy document, which has been checked to have no cycle."""

    def __init__(self, deploy: DeployConfig) -> None:
        self.deploy = deploy
        #: In document order; the document has every stage after its inputs.
        self.stage_ids = tuple(stage.stage_id for stage in deploy.stages)
        self._inputs = {stage_id: deploy.inputs_of(stage_id) for stage_id in self.stage_ids}
        self._next: dict[int, tuple[int, ...]] = {
            stage_id: tuple(after for after in self.stage_ids if stage_id in self._inputs[after])
            for stage_id in self.stage_ids
        }
        self._finals = {stage.stage_id: stage.final_output for stage in deploy.stages if stage.final_output != "none"}
        #: The plans of requests for all modalities, by ``async_chunk``.
        self._whole: dict[bool | None, RequestPlan] = {}

    @property
    def modalities(self) -> tuple[str, ...]:
        """The modalities of this pipeline's outputs, in document order."""
        return tuple(dict.fromkeys(self._finals.values()))

    def inputs_of(self, stage_id: int) -> tuple[int, ...]:
        """The stages whose hand-off a stage takes; empty for one that takes the client's input."""
        return self._inputs[stage_id]

    def next_of(self, stage_id: int) -> tuple[int, ...]:
        """The stages that take a stage's hand-off."""
        return self._next[stage_id]

    def plan(self, modalities: Sequence[str] | None = None, async_chunk: bool | None = None) -> RequestPlan:
        """The stages needed for the wanted modalities (None: all). Raise InvalidRequestError for an unknown one.

        ``async_chunk`` is whether hand-offs are to travel in pieces; None: as the document says.
        """
        if modalities is not None:
            return self._plan(tuple(modalities), async_chunk)
        if async_chunk not in self._whole:
            self._whole[async_chunk] = self._plan(self.modalities, async_chunk)
        return self._whole[async_chunk]

    def _plan(self, wanted: tuple[str, ...], async_chunk: bool | None) -> RequestPlan:
        unknown = [modality for modality in wanted if modality not in self.modalities]
        if unknown or not wanted:
            asked = ", ".join(repr(modality) for modality in unknown) or "no modality"
            raise InvalidRequestError(f"{asked} was asked for; this pipeline puts out {', '.join(self.modalities)}")
        finals = {stage_id: modality for stage_id, modality in self._finals.items() if modality in wanted}
        needed = self._with_ancestors(finals)
        return RequestPlan(
            stages=tuple(stage_id for stage_id in self.stage_ids if stage_id in needed),
            inputs={stage_id: self._inputs[stage_id] for stage_id in needed},
            next_stages={
                stage_id: tuple(after for after in self._next[stage_id] if after in needed) for stage_id in needed
            },
            finals=finals,
            windows={
                (before, after): self.deploy.window_of(before, after)
                for after in self.stage_ids
                if after in needed
                for before in self._inputs[after]
                if self.deploy.async_chunk_of(before, after, async_chunk)
            },
        )

    def params_of(
        self, params: Mapping[int, Mapping[str, Any]] | None, each: Sequence[Mapping[str, Any] | None] | None
    ) -> Mapping[int, Mapping[str, Any]] | None:
        """Sampling parameters by stage id: ``params``, or those of ``each``, in document order.

        None in the list means the defaults, and so does a list that ends early. Raise InvalidRequestError for a list
        that is too long, or for both.
        """
        if each is None:
            return params
        if params is not None:
            raise InvalidRequestError("give params or sampling_params_list, not both")
        if len(each) > len(self.stage_ids):
            raise InvalidRequestError(
                f"'sampling_params_list' has {len(each)} entries; the pipeline has {len(self.stage_ids)} stages"
            )
        return {stage_id: params for stage_id, params in zip(self.stage_ids, each, strict=False) if params is not None}

    def merge_params(self, params: Mapping[int, Mapping[str, Any]] | None) -> dict[int, dict[str, Any]]:
        """Sampling parameters of every stage: the document's defaults, overruled by the request's.

        Raise InvalidRequestError if ``params`` names a stage that is not there.
        """
        params = params or {}
        unknown = sorted(set(params) - set(self.stage_ids))
        if unknown:
            known = ", ".join(map(str, self.stage_ids))
            raise InvalidRequestError(f"parameters for stage {unknown[0]}; this pipeline has the stages {known}")
        return {
            stage.stage_id: {**stage.default_sampling_params, **params.get(stage.stage_id, {})}
            for stage in self.deploy.stages
        }

    def _with_ancestors(self, finals: Mapping[int, str]) -> set[int]:
        needed: set[int] = set()
        waiting = list(finals)
        while waiting:
            stage_id = waiting.pop()
            if stage_id not in needed:
                needed.add(stage_id)
                waiting.extend(self._inputs[stage_id])
        return needed
