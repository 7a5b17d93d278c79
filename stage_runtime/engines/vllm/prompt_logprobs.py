"""Log probabilities of prompt tokens: requested from vLLM until an answer begins, and sent with its first token.

A run that continues an answer does not ask again: they were put out before. vLLM computes none for tokens of the prefix
cache, so a run that asks for them does not read it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_discovery.errors import InvalidRequestError
from omni_discovery.wire import MAX_PROMPT_LOGPROBS
from stage_runtime.engines.base import StageRequest

if TYPE_CHECKING:
    from stage_runtime.engines.vllm.handoff import Answer


def settle(params: Any, request: StageRequest, config: Any, *, is_split: bool, keeps_rows: bool) -> None:
    """Set whether the request reads the prefix cache: not if its hidden states are wanted. ``ask`` may set it later.

    Raise InvalidRequestError if it asks for log probabilities that a stage with this VllmConfig can't compute.
    """
    # Cached tokens are not computed, so they have no hidden states.
    params.skip_reading_prefix_cache = keeps_rows and bool(request.next_stages)
    if params.prompt_logprobs is None:
        return
    if is_split:
        raise _refusal("a stage that is split into prefill and decode reads no whole prompt")
    if request.stream_from or request.segment is not None:
        raise _refusal("the prompt comes in pieces")
    if config.cache_config.kv_sharing_fast_prefill:
        raise _refusal("a stage with kv_sharing_fast_prefill does not compute them")


def ask(params: Any, answer: Answer) -> None:
    """Make a run's parameters ask for them unless the answer has begun. Raise InvalidRequestError."""
    if params.prompt_logprobs is None:
        return
    if answer.token_ids:
        params.prompt_logprobs = None
        return
    if answer.prompt.embeds is not None:
        raise _refusal("the prompt is no tokens")
    count = len(answer.prompt) * (params.prompt_logprobs + 1)
    if count > MAX_PROMPT_LOGPROBS:
        raise _refusal(
            f"{params.prompt_logprobs} and its own for each of {len(answer.prompt)} tokens are more than the "
            f"{MAX_PROMPT_LOGPROBS} that one request may have; ask for fewer"
        )
    params.skip_reading_prefix_cache = True


def _refusal(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"prompt_logprobs: {why}; leave them out")
