"""The hidden states that a model makes on its way to each token, for the next stage.

Taken where the model's outer module returns them, so in this process only. What the prefix cache remembers is not
computed again and has none: requests that want them don't read it.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from omni_discovery.errors import ConfigError


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

    def follow(self, vllm_id: str) -> None:
        """Keep those of a request from now on."""
        self._rows[vllm_id] = Rows()

    def of(self, vllm_id: str) -> Rows:
        """Those of a request that is followed."""
        return self._rows[vllm_id]

    def forget(self, vllm_id: str) -> None:
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
