"""What a vLLM stage hands over of an answer: all of it at its end, or piece by piece while it is made.

A piece holds as many tokens as all pieces before it, at most ``LONGEST_PIECE``: the next stage begins with the first
token, and a long answer costs few hand-offs. Joined, the pieces are the whole.

The hidden states that a model makes on its way to each token, for the next stage.

Taken where the model's outer module returns them, so in this process only. What the prefix cache remembers is not
computed again and has none: requests that want them don't read it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from omni_discovery.errors import ConfigError
from stage_runtime.engines.base import StageRequest
from stage_runtime.engines.vllm.prompt import Prompt
from stage_runtime.engines.vllm.resume import ResumableDetokenizer


class Rows:
    """The hidden states of one request, a row for each token that the model has read, from the prompt's first on."""

    def __init__(self) -> None:
        self._chunks: list[Any] = []
        #: At which token each chunk begins.
        self._starts: list[int] = []
        self._count = 0

    def put(self, start: int, chunk: Any) -> None:
        """Rows from a token on; those that were there, as after a preemption, are replaced.

        Behind a gap nothing is kept: ``between`` tells what is missing.
        """
        if start > self._count:
            return
        while self._starts and self._starts[-1] >= start:
            self._starts.pop()
            self._chunks.pop()
        if self._chunks:
            self._chunks[-1] = self._chunks[-1][: start - self._starts[-1]]
        self._starts.append(start)
        self._chunks.append(chunk)
        self._count = start + int(chunk.shape[0])

    def between(self, start: int, end: int) -> Any:
        """Rows from one token up to another, of shape (tokens, hidden size). Raise LookupError if some never came."""
        if end > self._count or not self._chunks:
            raise LookupError(f"hidden states of {self._count} tokens came, of {end} are needed")
        import torch

        first = max(0, bisect_right(self._starts, start) - 1)
        skipped = self._starts[first]
        return torch.cat(self._chunks[first:])[start - skipped : end - skipped].clone()


class HiddenStates:
    """Those of all requests that were asked for, by vLLM's own names of them."""

    def __init__(self, llm: Any, where: str) -> None:
        """Listen to a loaded LLMEngine. Raise ConfigError if they can't be had from it."""
        if not llm.vllm_config.model_config.enforce_eager:
            raise ConfigError(f"{where}: hidden states need engine_args.enforce_eager: true; graphs don't show them")
        try:
            self._runner: Any = llm.model_executor.driver_worker.worker.model_runner
            self._runner.query_start_loc.np, self._runner.input_batch.num_computed_tokens_cpu  # noqa: B018
            self._hook = self._runner.get_model().register_forward_hook(self._listen)
        except AttributeError as error:
            raise ConfigError(
                f"{where}: hidden states are had from a model in the replica's own process only, without tensor or"
                f" pipeline parallelism, by vLLM's first model runner ({error})"
            ) from error
        self._rows: dict[str, Rows] = {}

    def record_rows(self, vllm_id: str) -> None:
        """Keep those of a request from now on."""
        self._rows[vllm_id] = Rows()

    def rows_of(self, vllm_id: str) -> Rows:
        """Those of a request that is followed."""
        return self._rows[vllm_id]

    def drop_rows(self, vllm_id: str) -> None:
        """Drop them. Unknown requests are fine."""
        self._rows.pop(vllm_id, None)

    def close(self) -> None:
        """Listen no more."""
        self._hook.remove()
        self._rows.clear()

    def _listen(self, _module: Any, _args: Any, output: Any) -> None:
        batch = self._runner.input_batch
        followed = [(index, vllm_id) for index, vllm_id in enumerate(batch.req_ids) if vllm_id in self._rows]
        if not followed:
            return
        made = (output[0] if isinstance(output, tuple) else output).detach().to("cpu")
        ends = self._runner.query_start_loc.np
        for index, vllm_id in followed:
            # A copy: the rows of the whole batch would stay in memory with it.
            rows = made[int(ends[index]) : int(ends[index + 1])].clone()
            self._rows[vllm_id].put(int(batch.num_computed_tokens_cpu[index]), rows)


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
    detokenizer: ResumableDetokenizer | None = None
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
