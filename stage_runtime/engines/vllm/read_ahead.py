"""Prompts that come piece by piece from the stages before.

The answer begins when all is there, and is token for token that of a request that came whole. Meanwhile the prefix
cache reads ahead: what is known of the prompt is put through the model block by block, so that only its end is left to
be read. vLLM's own streaming sessions do the same and keep the request open; they take no embeds, and bind the request
to one sampling bound per piece.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.base import StageRequest
from stage_runtime.engines.vllm.load import Model
from stage_runtime.engines.vllm.params import sampling_params
from stage_runtime.engines.vllm.prompt import Prompt, checked_prompt, read_handed, salt_of
from stage_runtime.engines.vllm.runs import Runs

_Handed = Mapping[str, Any]


@dataclass(slots=True)
class PartialPrompt:
    """A request whose prompt is not whole yet."""

    request: StageRequest
    params: Any
    lora: Any
    #: What has come, by stage; the prompt has them in the order of the stages.
    parts: dict[int, list[_Handed]]
    #: Which stages have not told all yet.
    owed: set[int]
    is_paused: bool = False
    #: How many tokens were read ahead, or are being.
    ahead: int = 0
    #: The tokens known so far, up to the end of the first stage that has more to say.
    known: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, request: StageRequest, params: Any, lora: Any) -> PartialPrompt:
        """Begin with what came whole."""
        stages = sorted({*request.payloads, *request.stream_from})
        parts = {stage: [request.payloads[stage]] if stage in request.payloads else [] for stage in stages}
        return cls(request, params, lora, parts, set(request.stream_from))

    def add_piece(self, from_stage: int, piece: _Handed | None, model: Model, *, is_last: bool) -> None:
        """The next piece of a stage, or that there is no more. Raise InvalidRequestError for what is no prompt."""
        if from_stage not in self.owed:
            return
        if piece is not None:
            self.parts[from_stage].append(piece)
        if is_last:
            self.owed.discard(from_stage)
        if model.embeds_size:
            # Embeds can't be read ahead, and joining them again for each piece would cost more than it tells.
            return
        prompt = read_handed(self._known_parts(), model)
        # Also where it is not whole: it can only become longer.
        # What items make of a prompt is known to vLLM alone.
        known = bool(len(prompt)) and prompt.items is None
        self.known = list(checked_prompt(prompt, model).token_ids) if known else []

    def next_ahead(self, model: Model) -> Prompt | None:
        """What to read ahead now: full blocks that nobody has read yet."""
        blocks = len(self.known) // model.block_size if model.block_size else 0
        if blocks * (model.block_size or 1) <= self.ahead:
            return None
        self.ahead = blocks * model.block_size
        return Prompt(self.known[: self.ahead], salt=salt_of(self.request))

    def whole(self) -> StageRequest | None:
        """The request as one whose hand-offs came whole; None while some are owed."""
        if self.owed:
            return None
        came = self.request.payloads
        payloads = {stage: came.get(stage, {"pieces": parts}) for stage, parts in self.parts.items()}
        return replace(self.request, payloads=payloads, stream_from=())

    def _known_parts(self) -> list[_Handed]:
        known: list[_Handed] = []
        for stage, parts in self.parts.items():
            known += parts
            if stage in self.owed:
                break
        return known


class ReadAhead:
    """Reads ahead, one run at a time for each request."""

    def __init__(self, runs: Runs, model: Model) -> None:
        self._runs = runs
        self._model = model
        #: Whose prompt is being read, by the run's name.
        self._reading: dict[str, PartialPrompt] = {}

    def read_ahead(self, growing: PartialPrompt) -> None:
        """Have what is new of a prompt read, if that is worth a run."""
        request, name = growing.request, _name(growing.request.key)
        # Who reads no cache has nothing of it.
        if name in self._reading or growing.params.skip_reading_prefix_cache:
            return
        prompt = growing.next_ahead(self._model)
        if prompt is None:
            return
        asked = sampling_params({"max_tokens": 1, "temperature": 0.0})
        # What is wrong with it is told when the request itself begins.
        with contextlib.suppress(InvalidRequestError):
            self._runs.start(name, prompt.with_answer(()), asked, request.priority, growing.lora)
            self._reading[name] = growing

    def consume_output(self, made: Any) -> bool:
        """Whether what vLLM has made is of a run of this one's; its token is nobody's."""
        growing = self._reading.get(made.request_id)
        if growing is None:
            return False
        if made.finished:
            del self._reading[made.request_id]
            self._runs.run_ended(made.request_id)
            self.read_ahead(growing)
        return True

    def stop(self, key: str) -> None:
        """The request begins, or is over. Unknown ones are fine."""
        if self._reading.pop(_name(key), None) is not None:
            self._runs.stop(_name(key))


def _name(key: str) -> str:
    return f"{key}#ahead"
