"""Fields of a chat completion request that this server does not serve, and what in them asks for nothing.

OpenAI's clients, and many programs around them, send such values always; a request that asks for something is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import InvalidRequestError


class NeutralFields(msgspec.Struct, frozen=True, kw_only=True):
    """A base for a request. ``check_neutral`` sees to the values."""

    audio: Any = None
    best_of: Any = None
    echo: Any = None
    function_call: Any = None
    functions: Any = None
    ignore_eos: Any = None
    logit_bias: Any = None
    logprobs: Any = None
    min_p: Any = None
    min_tokens: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    repetition_penalty: Any = None
    response_format: Any = None
    service_tier: Any = None
    stop_token_ids: Any = None
    tool_choice: Any = None
    tools: Any = None
    top_logprobs: Any = None
    verbosity: Any = None
    web_search_options: Any = None


#: By field, what may stand in it beside null.
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "ignore_eos": (False,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "parallel_tool_calls": (False, True),
    "prediction": (),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "stop_token_ids": ([],),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


def refuse_logprobs(stages: Sequence[StageConfig], explicit: Sequence[Mapping[str, Any] | None] | None) -> None:
    """Raise InvalidRequestError if what is asked of a vLLM stage has no place in this API's answers."""
    for stage, params in zip(stages, explicit or (), strict=False):
        for name in ("logprobs", "prompt_logprobs"):
            if stage.engine == "vllm" and params and params.get(name) is not None:
                raise InvalidRequestError(
                    f"'sampling_params_list': '{name}' are shown by a hub with --api vllm only; leave them out"
                )


def refuse_adapter_paths(explicit: Sequence[Mapping[str, Any] | None] | None) -> None:
    """Raise InvalidRequestError if a client says where an adapter is: that is the operator's to say."""
    for params in explicit or ():
        if params and not isinstance(params.get("lora"), str | None):
            raise InvalidRequestError("'sampling_params_list': 'lora' is the name of an adapter")


def refuse_embeddings(stages: Sequence[StageConfig], modalities: Sequence[str] | None) -> None:
    """Raise InvalidRequestError if a chat would be answered with what a stage pools: a message has no place for it."""
    stage = next((stage for stage in stages if stage.final_output == "embedding"), None)
    if stage is not None and (modalities is None or "embedding" in modalities):
        others = sorted({each.final_output for each in stages} - {"embedding", "none"})
        hint = f", or ask for 'modalities' {others} only" if others else ""
        raise InvalidRequestError(
            f"stage {stage.stage_id} makes embeddings, which are no part of a chat: ask POST /v1/embeddings of a hub "
            f"with --api vllm{hint}"
        )


def check_neutral(request: NeutralFields) -> None:
    """Raise InvalidRequestError if one of the fields asks for something."""
    for name, values in _NEUTRAL.items():
        value = getattr(request, name)
        if value is not None and not any(_is_same(value, each) for each in values):
            raise InvalidRequestError(f"'{name}' is not served here: leave it out")


def _is_same(value: Any, other: Any) -> bool:
    # To Python True is 1.
    return isinstance(value, bool) is isinstance(other, bool) and bool(value == other)
