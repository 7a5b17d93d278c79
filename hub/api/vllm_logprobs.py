"""How likely the tokens of an answer, and those of its prompt, were, in vLLM's own form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logprobs import Logprob
from vllm.sampling_params import RequestOutputKind

from omni_discovery.errors import EngineFailedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hub.outputs import OmniOutput
    from omni_discovery.wire import TokenLogprobs


class Logprobs:
    """Those of one answer so far: what its tokens add up to and, unless they go out as they come, each of them."""

    def __init__(self) -> None:
        self.places: list[dict[int, Logprob]] = []
        self.total = 0.0

    def add(self, output: OmniOutput, kind: RequestOutputKind) -> list[dict[int, Logprob]]:
        """One entry for each new token, which comes first in it. Raise EngineFailedError if some are missing."""
        told, due = len(output.logprobs), len(output.token_ids)
        if told != due:
            raise EngineFailedError(f"stage {output.stage_id} gave logprobs of {told} tokens where there are {due}")
        new = _in_vllms_form(output.logprobs)
        self.total += sum(place[0].logprob for place in output.logprobs)
        if kind != RequestOutputKind.DELTA:
            self.places += new
        return new


class PromptLogprobs:
    """Those of the prompt of one answer: they come before the answer, in several outputs where there are many."""

    def __init__(self) -> None:
        #: None for the first token, which nothing comes before.
        self._places: list[dict[int, Logprob] | None] = [None]
        self._is_told = False

    def add(self, output: OmniOutput, prompt_tokens: int) -> bool:
        """Take in those of an output; whether the answer has begun. Raise EngineFailedError if it has without them."""
        self._places += _in_vllms_form(output.prompt_logprobs)
        if self._is_told or not (output.token_ids or output.finish_reason):
            return self._is_told
        # One that was aborted may have had none of them.
        if len(self._places) != prompt_tokens and output.finish_reason != "abort":
            told = f"stage {output.stage_id} gave logprobs of {len(self._places) - 1} tokens"
            raise EngineFailedError(f"{told} of a prompt that has {prompt_tokens - 1} behind its first")
        self._is_told = True
        return True

    def shown(self, kind: RequestOutputKind) -> list[dict[int, Logprob] | None]:
        """What the server gets of them now: all each time, but where it gets pieces, once."""
        places = self._places
        if kind == RequestOutputKind.DELTA:
            self._places = []
        return places


def _in_vllms_form(places: Iterable[TokenLogprobs]) -> list[dict[int, Logprob]]:
    return [{token_id: Logprob(logprob, rank, text) for token_id, logprob, rank, text in place} for place in places]
