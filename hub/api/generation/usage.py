"""Token counts of one HTTP request, which may be several requests to a pipeline of several stages. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hub.request.outputs import OmniOutput


class Usage:
    """Counts each prompt once, whatever stages read it, and what all stages have made of it.

    ``stage_ids`` are in the order of the document: what its first stage calls the prompt is the client's. Every
    ``answers`` requests in a row have the same prompt.
    """

    def __init__(self, stage_ids: Sequence[int], answers: int = 1) -> None:
        self._order = {stage_id: place for place, stage_id in enumerate(stage_ids)}
        self._answers = answers
        #: The counts of each stage that has ended, by request and stage.
        self._ended: dict[tuple[int, int], Mapping[str, int]] = {}
        #: Tokens of stages that have not ended.
        self._tokens: dict[tuple[int, int], int] = {}
        #: The stages that put out sound.
        self._sound: set[int] = set()

    def add(self, number: int, output: OmniOutput) -> None:
        """Count an output of the request with this number."""
        place = number, output.stage_id
        if output.modality == "audio":
            self._sound.add(output.stage_id)
        if output.finish_reason is not None:
            self._ended[place] = output.usage
            self._tokens.pop(place, None)
        elif output.token_ids:
            self._tokens[place] = self._tokens.get(place, 0) + len(output.token_ids)

    @property
    def prompt_tokens(self) -> int:
        """The tokens of all prompts."""
        last = len(self._order)
        prompts: dict[int, tuple[int, int]] = {}
        for (number, stage_id), counts in self._ended.items():
            tokens = counts.get("prompt_tokens", 0)
            prompt, rank = number // self._answers, -self._order.get(stage_id, last)
            if tokens:
                prompts[prompt] = max(prompts.get(prompt, (rank, tokens)), (rank, tokens))
        return sum(tokens for _, tokens in prompts.values())

    @property
    def completion_tokens(self) -> int:
        """The tokens that all stages have made."""
        return sum(counts.get("completion_tokens", 0) for counts in self._ended.values()) + sum(self._tokens.values())

    def shown(self) -> dict[str, Any]:
        """The counts as chats and completions have them."""
        prompt, completion = self.prompt_tokens, self.completion_tokens
        counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        if not self._sound:
            return counts
        ended = self._ended.items()
        sound = sum(each.get("completion_tokens", 0) for (_, stage_id), each in ended if stage_id in self._sound)
        return {**counts, "completion_tokens_details": {"audio_tokens": sound}}

    def shown_as_input(self) -> dict[str, int]:
        """The counts as the routes of sound and pictures have them."""
        prompt, completion = self.prompt_tokens, self.completion_tokens
        return {"input_tokens": prompt, "output_tokens": completion, "total_tokens": prompt + completion}
