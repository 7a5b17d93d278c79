"""How likely the tokens of an answer were, in vLLM's own form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logprobs import Logprob
from vllm.sampling_params import RequestOutputKind

from omni_discovery.errors import EngineFailedError

if TYPE_CHECKING:
    from hub.outputs import OmniOutput


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
        new = [
            {token_id: Logprob(logprob, rank, text) for token_id, logprob, rank, text in place}
            for place in output.logprobs
        ]
        self.total += sum(place[0].logprob for place in output.logprobs)
        if kind != RequestOutputKind.DELTA:
            self.places += new
        return new
