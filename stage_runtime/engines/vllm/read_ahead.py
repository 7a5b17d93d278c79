"""Prompts that come piece by piece from earlier stages, and the prefill of their known part.

The answer begins when the prompt is complete, and is token for token that of a request whose prompt came whole.
Meanwhile the known part is put through the model block by block, into the prefix cache, so that only its end is left to
prefill. vLLM's own streaming sessions do the same and keep the request open; they take no embeds, and bind the request
to one sampling bound per piece.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from msgspec.structs import replace

from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.base import StageRequest
from stage_runtime.engines.prompts import LONG
from stage_runtime.engines.vllm.load import Model
from stage_runtime.engines.vllm.prompt import (
    Prompt,
    checked_prompt,
    count_ids,
    ids_name,
    ids_size,
    is_counted,
    read_handed,
    read_ids,
    salt_of,
    text_size,
)
from stage_runtime.engines.vllm.runs import Runs
from stage_runtime.engines.vllm.sampling_params import check_length, check_prompt, sampling_params

_Handed = Mapping[str, Any]
#: Texts are read anew with all before them, but only once more has come than a part of these.
_UNREAD: Final = 8


@dataclass(slots=True)
class PartialPrompt:
    """A request whose prompt is not complete yet."""

    request: StageRequest
    params: Any
    lora: Any
    #: The pieces that have come, by stage; the prompt has them in the order of the stages.
    parts: dict[int, list[_Handed]]
    #: Stages that have pieces left to send.
    owed: set[int]
    is_paused: bool = False
    #: How many tokens were prefilled ahead, or are being.
    ahead: int = 0
    #: The tokens known so far, up to the end of the first stage that has pieces left to send.
    known: list[int] = field(default_factory=list)
    #: Up to where they were read, in which stage's pieces and how many of those; and under which name, none if they
    #: were more than token ids.
    read_to: tuple[int, int] = (0, 0)
    known_name: str = ""
    #: Of how much they were read, in characters of texts, or in pieces without any; and how many pieces have come.
    known_from: int = 0
    came: int = 0
    #: Of all that has come, counted alike; and whether it is a long text, which is read when all of it is there.
    characters: int = 0
    is_long: bool = False
    #: How long the prompt is so far, where it may be one of embeds; texts don't count yet.
    rows: int = 0

    @classmethod
    def of(cls, request: StageRequest, params: Any, lora: Any) -> PartialPrompt:
        """The prompt of a new request, with the hand-offs that came whole."""
        stages = sorted({*request.payloads, *request.stream_from})
        parts = {stage: [request.payloads[stage]] if stage in request.payloads else [] for stage in stages}
        size = text_size(request.payloads.values())
        return cls(request, params, lora, parts, set(request.stream_from), characters=size)

    def add_piece(self, from_stage: int, piece: _Handed | None, model: Model, *, is_last: bool) -> None:
        """Add the next piece of a stage, or note its end. Raise InvalidRequestError for a piece that is no prompt."""
        if from_stage not in self.owed:
            return
        if piece is not None:
            self.parts[from_stage].append(piece)
            self.came += 1
            self.characters += text_size([piece]) + (ids_size(piece) if self.is_long else 0)
            model.bounded.check_characters(self.characters)
            # Each has a token at least, but for some.
            if self.came > model.max_model_len:
                raise InvalidRequestError(
                    f"the hand-off has more pieces than this model takes tokens: {model.max_model_len}"
                )
        if is_last:
            self.owed.discard(from_stage)
        if model.embeds_size:
            # Embeds can't be prefilled ahead.
            self.rows += len(read_handed([piece], model)) if piece is not None and is_counted(piece) else 0
            check_length(self.rows, model.max_model_len, model.least_answer)
            return
        is_text = self.known_from > 0 and not self.known_name
        # To go through all that is unread with each piece would take ever longer.
        if self.is_long or (is_text and self.characters - self.known_from <= self.known_from // _UNREAD):
            return
        new, read_to = self._unread()
        name = self.known_name or (ids_name(new[0]) if new and not self.known_from else "")
        if name and all(ids_name(part) == name for part in new):
            self._add_known([part[name] for part in new], name, model)
            self.read_to = read_to
            return
        size = text_size(new)
        # A long text is read once, in a thread.
        self.is_long = not self.known_name and self.known_from + size >= LONG
        if self.is_long or (not self.known_name and size <= self.known_from // _UNREAD):
            return
        self.known_from, self.known_name, self.read_to = self.known_from + size, "", read_to
        prompt = read_handed(self._known_parts(), model)
        # A part is checked, too: a prompt can only become longer. Only vLLM knows which tokens items become.
        known = bool(len(prompt)) and prompt.items is None
        self.known = list(checked_prompt(prompt, model).token_ids) if known else []

    def _add_known(self, values: Sequence[Any], name: str, model: Model) -> None:
        """Read what has come since the last time: to read it all anew each time would take ever longer."""
        check_length(
            len(self.known) + sum(count_ids(each, name) for each in values), model.max_model_len, model.least_answer
        )
        new = [token_id for each in values for token_id in read_ids(each, name)]
        if new:
            check_prompt(new, model.max_model_len, model.vocab_size, model.least_answer)
        self.known += new
        self.known_from, self.known_name = self.known_from + len(values), name

    def next_ahead(self, model: Model) -> Prompt | None:
        """The known full blocks if there are new ones to prefill, else None."""
        blocks = len(self.known) // model.block_size if model.block_size else 0
        if blocks * (model.block_size or 1) <= self.ahead:
            return None
        self.ahead = blocks * model.block_size
        return Prompt(self.known[: self.ahead], salt=salt_of(self.request, model))

    def whole(self) -> StageRequest | None:
        """The request with complete hand-offs; None while pieces are still to come."""
        if self.owed:
            return None
        came = self.request.payloads
        payloads = {stage: came.get(stage, {"pieces": parts}) for stage, parts in self.parts.items()}
        return replace(self.request, payloads=payloads, stream_from=())

    def _unread(self) -> tuple[list[_Handed], tuple[int, int]]:
        """The known parts that were not read yet, and up to where they are."""
        stages, (at, offset) = list(self.parts), self.read_to
        new = self.parts[stages[at]][offset:]
        while stages[at] not in self.owed and at + 1 < len(stages):
            at += 1
            new += self.parts[stages[at]]
        return new, (at, len(self.parts[stages[at]]))

    def _known_parts(self) -> list[_Handed]:
        known: list[_Handed] = []
        for stage, parts in self.parts.items():
            known += parts
            if stage in self.owed:
                break
        return known


class ReadAhead:
    """Prefills known parts of prompts, one run at a time for each request."""

    def __init__(self, runs: Runs, model: Model) -> None:
        self._runs = runs
        self._model = model
        #: The prompt that is being prefilled, by the run's name.
        self._reading: dict[str, PartialPrompt] = {}

    def read_ahead(self, partial: PartialPrompt) -> None:
        """Start a run for the new full blocks of a prompt, if there are any and none is running for it."""
        request, name = partial.request, _name(partial.request.key)
        # A request that reads no prefix cache gains nothing.
        if name in self._reading or partial.params.skip_reading_prefix_cache:
            return
        prompt = partial.next_ahead(self._model)
        if prompt is None:
            return
        asked = sampling_params({"max_tokens": 1, "temperature": 0.0})
        # A bad prompt is reported when the request itself begins.
        with contextlib.suppress(InvalidRequestError):
            self._runs.start(name, prompt.with_answer(()), asked, request.priority, partial.lora)
            self._reading[name] = partial

    def consume_output(self, made: Any) -> bool:
        """Whether an output of vLLM belongs to such a run; then it was handled, and its token is to be dropped."""
        partial = self._reading.get(made.request_id)
        if partial is None:
            return False
        if made.finished:
            del self._reading[made.request_id]
            self._runs.run_ended(made.request_id)
            self.read_ahead(partial)
        return True

    def stop(self, key: str) -> None:
        """Abort the run for a request that begins or is over. Unknown keys are ignored."""
        if self._reading.pop(_name(key), None) is not None:
            self._runs.stop(_name(key))


def _name(key: str) -> str:
    return f"{key}#ahead"
