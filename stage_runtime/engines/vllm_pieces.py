"""What a vLLM stage hands over of an answer: all of it at its end, or piece by piece while it is made.

A piece holds as many tokens as all pieces before it, at most ``LONGEST_PIECE``: the next stage begins with the first
token, and a long answer costs few hand-offs. Joined, the pieces are the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from stage_runtime.engines.base import StageRequest
from stage_runtime.engines.vllm_hidden import Rows
from stage_runtime.engines.vllm_inputs import Prompt
from stage_runtime.engines.vllm_resume import Wording

LONGEST_PIECE: Final = 16


class HandoffArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a stage hands over: of every answer, or of those that hold ``require_token``; hidden states, too."""

    require_token: str = ""
    hidden_states: bool = False


@dataclass(slots=True)
class Answer:
    """One request that vLLM has, or that is paused."""

    request: StageRequest
    prompt: Prompt
    #: As they were asked; vLLM may have been asked for less.
    params: Any
    lora: Any = None
    #: How many tokens of the prompt are what earlier segments asked and were answered.
    earlier: int = 0
    #: The whole answer, with what another replica showed of it.
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    #: Makes the text of an answer that was begun elsewhere or interrupted; vLLM itself makes that of the others.
    wording: Wording | None = None
    is_paused: bool = False
    #: How many tokens vLLM has put into the prompt for its items, and how much of the answer it got with the prompt.
    item_tokens: int = 0
    given: int = 0
    rows: Rows | None = None
    #: How much of it was handed over in pieces: tokens, characters, and rows of hidden states.
    handed: int = 0
    handed_text: int = 0
    handed_rows: int = 0

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.texts)

    @property
    def usage(self) -> dict[str, int]:
        """What it cost so far; of the prompt, what this segment brought."""
        return {"prompt_tokens": self.prompt_tokens - self.earlier, "completion_tokens": len(self.token_ids)}

    @property
    def prompt_tokens(self) -> int:
        """How long the prompt is, with its items in it."""
        return len(self.prompt) + self.item_tokens


class Handoffs:
    """Makes the hand-offs of a stage. ``required_id`` is the token that an answer must hold, if there is one."""

    def __init__(self, required_id: int | None) -> None:
        self._required_id = required_id

    def whole(self, answer: Answer) -> Mapping[str, Any] | None:
        """All that the next stages get of an answer that has ended; None if they have nothing to do, or have it all."""
        request = answer.request
        in_pieces = request.stream_to if answer.handed else ()
        if set(request.next_stages) <= set(in_pieces) or not self._is_wanted(answer):
            return None
        return _handoff(answer, 0, answer.text, 0)

    def piece(self, answer: Answer, *, is_last: bool) -> Mapping[str, Any] | None:
        """What goes to the next stages now, if anything does."""
        new = len(answer.token_ids) - answer.handed
        enough = 1 if is_last else min(max(1, answer.handed), LONGEST_PIECE)
        if not answer.request.stream_to or new < enough or not self._is_wanted(answer):
            return None
        text = answer.text
        piece = _handoff(answer, answer.handed, text[answer.handed_text :], answer.handed_rows)
        answer.handed, answer.handed_text, answer.handed_rows = len(answer.token_ids), len(text), _rows_of(answer)
        return piece

    def _is_wanted(self, answer: Answer) -> bool:
        return self._required_id is None or self._required_id in answer.token_ids


def _rows_of(answer: Answer) -> int:
    # Of the last token there are none: the model has made it, not read it.
    return answer.prompt_tokens + len(answer.token_ids) - 1


def _handoff(answer: Answer, first_token: int, text: str, first_row: int) -> dict[str, Any]:
    import torch

    handed = {"token_ids": torch.tensor(answer.token_ids[first_token:], dtype=torch.int64), "text": text}
    if answer.rows is not None:
        handed["hidden_states"] = answer.rows.between(first_row, _rows_of(answer))
    return handed
