"""The hand-offs of a vLLM stage: an answer as a whole, or piece by piece while it is generated; and hidden states.

A piece holds as many tokens as all pieces before it, ``LONGEST_PIECE`` at most: the next stage begins with the first
token, and a long answer costs few hand-offs. Concatenated, the pieces are the whole.

Hidden states are recorded by a forward hook of the model, so in this process only. Tokens from the prefix cache are
not computed and have none: requests that want hidden states don't read the cache.
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
    """The hidden states of one request: a row for each token that the model has read, from the prompt's first on."""

    def __init__(self) -> None:
        self._chunks: list[Any] = []
        #: The index of each chunk's first token.
        self._starts: list[int] = []
        self._count = 0

    def put(self, start: int, chunk: Any) -> None:
        """Add rows of shape [tokens, hidden size] from token ``start`` on, in place of later rows (after a preemption).

        Rows behind a gap are dropped; ``between`` raises for the gap.
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
        """A copy of the rows from token ``start`` up to ``end``, of shape [end - start, hidden size].

        Raise LookupError if some of them were not recorded.
        """
        if end > self._count or not self._chunks:
            raise LookupError(f"hidden states of {self._count} tokens came, of {end} are needed")
        import torch

        first = max(0, bisect_right(self._starts, start) - 1)
        skipped = self._starts[first]
        return torch.cat(self._chunks[first:])[start - skipped : end - skipped].clone()


class HiddenStates:
    """Records the hidden states of chosen requests, by vLLM's own names of them."""

    def __init__(self, llm: Any, where: str) -> None:
        """Hook into the model of a loaded LLMEngine. Raise ConfigError if its hidden states can't be read."""
        if not llm.vllm_config.model_config.enforce_eager:
            raise ConfigError(f"{where}: hidden states need engine_args.enforce_eager: true; graphs don't show them")
        try:
            self._runner: Any = llm.model_executor.driver_worker.worker.model_runner
            self._runner.query_start_loc.np, self._runner.input_batch.num_computed_tokens_cpu  # noqa: B018
            self._hook = self._runner.get_model().register_forward_hook(self._record_step)
        except AttributeError as error:
            raise ConfigError(
                f"{where}: hidden states are had from a model in the replica's own process only, without tensor or"
                f" pipeline parallelism, by vLLM's first model runner ({error})"
            ) from error
        self._rows: dict[str, Rows] = {}

    def record_rows(self, vllm_id: str) -> None:
        """Record the rows of a request from now on."""
        self._rows[vllm_id] = Rows()

    def rows_of(self, vllm_id: str) -> Rows:
        """The rows of a request that is recorded. Raise KeyError for any other."""
        return self._rows[vllm_id]

    def drop_rows(self, vllm_id: str) -> None:
        """Stop recording a request and drop its rows. Unknown requests are ignored."""
        self._rows.pop(vllm_id, None)

    def close(self) -> None:
        """Remove the hook and drop all rows."""
        self._hook.remove()
        self._rows.clear()

    def _record_step(self, _module: Any, _args: Any, output: Any) -> None:
        batch = self._runner.input_batch
        recorded = [(index, vllm_id) for index, vllm_id in enumerate(batch.req_ids) if vllm_id in self._rows]
        if not recorded:
            return
        made = (output[0] if isinstance(output, tuple) else output).detach().to("cpu")
        ends = self._runner.query_start_loc.np
        for index, vllm_id in recorded:
            # A copy: the rows of the whole batch would stay in memory with it.
            rows = made[int(ends[index]) : int(ends[index + 1])].clone()
            self._rows[vllm_id].put(int(batch.num_computed_tokens_cpu[index]), rows)


#: The most tokens of one piece.
LONGEST_PIECE: Final = 16


class HandoffArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``engine_args.handoff``. With ``require_token``, only answers that hold this token are handed over."""

    require_token: str = ""
    hidden_states: bool = False


@dataclass(slots=True)
class Answer:
    """One request with a complete prompt, running in vLLM or paused."""

    request: StageRequest
    prompt: Prompt
    #: vLLM's parameters of the whole answer; a run after a pause asks for less.
    params: Any
    lora: Any = None
    #: How many tokens of the prompt are earlier segments and their answers.
    earlier: int = 0
    #: The answer so far, with the part that another replica has shown.
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    #: Makes the text of an answer that another replica began or that was paused; vLLM makes the text of any other.
    detokenizer: ResumableDetokenizer | None = None
    is_paused: bool = False
    #: How many tokens vLLM has put into the prompt for its items, and how many of the answer the last run began with.
    item_tokens: int = 0
    given: int = 0
    rows: Rows | None = None
    #: What was handed over in pieces: the number of tokens, of characters, and of rows of hidden states.
    handed: int = 0
    handed_text: int = 0
    handed_rows: int = 0

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)

    @property
    def usage(self) -> dict[str, int]:
        """Token counts so far; of the prompt, only this segment's."""
        return {"prompt_tokens": self.prompt_tokens - self.earlier, "completion_tokens": len(self.token_ids)}

    @property
    def prompt_tokens(self) -> int:
        """The length of the prompt in tokens, with those of its items."""
        return len(self.prompt) + self.item_tokens


class Handoffs:
    """Makes the hand-offs of a stage. ``required_id``: only answers with this token are handed over; None: all."""

    def __init__(self, required_id: int | None) -> None:
        self._required_id = required_id

    def whole(self, answer: Answer) -> Mapping[str, Any] | None:
        """The hand-off of an ended answer; None if it is not handed over, or every next stage had it in pieces."""
        request = answer.request
        in_pieces = request.stream_to if answer.handed else ()
        if set(request.next_stages) <= set(in_pieces) or not self._is_wanted(answer):
            return None
        return _handoff(answer, 0, answer.text, 0)

    def piece(self, answer: Answer, *, is_last: bool) -> Mapping[str, Any] | None:
        """The next piece of an answer, None if none is due."""
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
    # The last token has no row: the model has generated it, not read it.
    return answer.prompt_tokens + len(answer.token_ids) - 1


def _handoff(answer: Answer, first_token: int, text: str, first_row: int) -> dict[str, Any]:
    import torch

    handed = {"token_ids": torch.tensor(answer.token_ids[first_token:], dtype=torch.int64), "text": text}
    if answer.rows is not None:
        handed["hidden_states"] = answer.rows.between(first_row, _rows_of(answer))
    return handed
