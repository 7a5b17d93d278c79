"""A request's parameters as vLLM's SamplingParams or PoolingParams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from omni_discovery.errors import InvalidRequestError


def sampling_params(given: Mapping[str, Any], vocab_size: int | None = None) -> Any:
    """The SamplingParams for the result of ``token_sampling``.

    With ``vocab_size``, token ids among them are checked. Raise InvalidRequestError if vLLM refuses them.
    """
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import RequestOutputKind

    chosen = {name: value for name, value in given.items() if value is not None}
    # Without a bound of its own, an answer may fill the context.
    chosen.setdefault("max_tokens", None)
    # It is the prompt's, see ``prompt.salt_of``.
    chosen.pop("cache_salt", None)
    try:
        for name, kind in _classes().items():
            if name in chosen:
                # Only the fields that were set: an older vLLM may not know the others.
                chosen[name] = kind(**msgspec.to_builtins(chosen[name]))
        params = SamplingParams(output_kind=RequestOutputKind.DELTA, **chosen)
    except (TypeError, ValueError, VLLMValidationError) as error:
        raise InvalidRequestError(str(error)) from error
    if vocab_size is not None:
        check_chosen_tokens(params, vocab_size)
    return params


#: Tokens with which a model ends its answers by itself, at most.
_MOST_ENDS: Final = 16


def check_chosen_tokens(params: Any, vocab_size: int) -> None:
    """Raise InvalidRequestError for tokens to stop at, or to choose from, beyond the model's vocabulary.

    They are columns of its logits. vLLM lets some of them pass (before 0.29, or if only its tokenizer knows them).
    """
    for name in ("stop_token_ids", "allowed_token_ids"):
        for token_id in getattr(params, name) or ():
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(f"{name}: {token_id} is out of the vocabulary of {vocab_size}")
    allowed = params.allowed_token_ids or ()
    if len(set(allowed)) < len(allowed):
        raise InvalidRequestError("allowed_token_ids: some are there more than once; name each once")


def check_runner_bounds(params: Any, vllm_config: Any) -> None:
    """Raise InvalidRequestError for more tokens than vLLM's model runner V2 has room for: its step would fail for all.

    That runner is used on GPUs by default. Of biases the hub takes no more than it has room for anyway, of bad words
    vLLM itself.
    """
    if not getattr(vllm_config, "use_v2_model_runner", False):
        return
    from vllm.v1.worker.gpu.sample import logit_bias as runner

    stops = params.stop_token_ids or () if params.min_tokens > 0 else ()
    for name, tokens, most in (
        ("allowed_token_ids", params.allowed_token_ids or (), runner.MAX_NUM_ALLOWED_TOKEN_IDS),
        # The model's own ends join them.
        ("stop_token_ids, with min_tokens", stops, runner.MAX_NUM_STOP_TOKEN_IDS - _MOST_ENDS),
    ):
        if len(tokens) > most:
            raise InvalidRequestError(
                f"{name}: {len(tokens)} tokens, where this stage's engine takes {most}; name fewer"
            )


def pooling_params(given: Mapping[str, Any], usual_task: str) -> Any:
    """The PoolingParams for the result of ``pooling_asked``. Raise InvalidRequestError if vLLM refuses them."""
    from vllm import PoolingParams
    from vllm.exceptions import VLLMValidationError

    chosen = {"task": usual_task, **given}
    types = chosen.pop("compressed_token_type_ids", None)
    chosen.pop("cache_salt", None)
    if types is not None:
        chosen["extra_kwargs"] = {"compressed_token_type_ids": types}
    try:
        return PoolingParams(**chosen)
    except (TypeError, ValueError, VLLMValidationError) as error:
        raise InvalidRequestError(str(error)) from error


def check_prompt(token_ids: Sequence[int], longest: int, vocab_size: int, least_answer: int = 1) -> None:
    """Raise InvalidRequestError for a prompt without room for ``least_answer`` tokens, or with an unknown token."""
    check_length(len(token_ids), longest, least_answer)
    if not are_known(token_ids, vocab_size):
        raise InvalidRequestError("a token id of the prompt is out of the vocabulary")


def are_known(token_ids: Sequence[int], vocab_size: int) -> bool:
    """Whether the model has a row for each of these tokens, of which there is one at least.

    vLLM's own check passes ids that only its tokenizer knows, and the engine would die of them.
    """
    return min(token_ids) >= 0 and max(token_ids) < vocab_size


def check_length(tokens: int, longest: int, least_answer: int = 1) -> None:
    """Raise InvalidRequestError for a prompt of so many tokens, if it leaves no room for ``least_answer`` more."""
    if tokens + least_answer > longest:
        answer = ", and at least one is for the answer" if least_answer else ""
        raise InvalidRequestError(
            f"this model's maximum context length is {longest} tokens{answer}; "
            f"the prompt has {tokens} tokens. Make it shorter"
        )


def _classes() -> dict[str, Any]:
    """The classes of vLLM for the parameters that are no plain values."""
    from vllm import sampling_params

    names = {"structured_outputs": "StructuredOutputsParams", "repetition_detection": "RepetitionDetectionParams"}
    return {name: getattr(sampling_params, kind) for name, kind in names.items() if hasattr(sampling_params, kind)}
