"""Builds requests for vLLM's engine core itself, from token ids.

The core checks nothing and fills in nothing: an id beyond the vocabulary kills it, a request without ``max_tokens``
runs until it fails an assertion, and it does not know which token ends an answer. This module does what vLLM's own
front end does before the core. Fields of the core's request come and go between releases, in the middle of the struct,
so it is built by keyword with the fields that the installed release has.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.answer_form import check_answer_form
from stage_runtime.engines.vllm.sampling_params import check_chosen_tokens

#: Further keys of a prompt, and their types; each goes into the field of the same name.
_PASSED_ON: Final = {
    "cache_salt": str,
    "priority": int,
    "trace_headers": Mapping,
    "lora_request": object,
    "session_id": str,
    "data_parallel_rank": int,
}
_PROMPT_KEYS: Final = frozenset({"prompt", "prompt_token_ids", "prompt_embeds", "prompt_is_token_ids", *_PASSED_ON})
#: Sampling parameters that only vLLM's front end can check and fill in.
_FRONT_ONLY: Final = ("trace_decode_token_ids", "prompt_logprob_token_ids")
#: Fields of the core's request that have no default in some releases.
_REQUIRED: Final = ("mm_features", "lora_request", "cache_salt", "data_parallel_rank")


@dataclass(frozen=True, slots=True)
class _Prompt:
    token_ids: list[int] | None
    embeds: Any
    is_token_ids: list[bool] | None
    passed_on: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.token_ids) if self.token_ids is not None else int(self.embeds.shape[0])


def build_engine_core_request_from_tokens(
    request_id: str,
    prompt: Mapping[str, Any],
    params: Any,
    arrival_time: float | None = None,
    model_config: Any = None,
    resumable: bool = False,
    mm_features: Sequence[Any] | None = None,
) -> Any:
    """The EngineCoreRequest of the installed vLLM for a prompt that is tokens already.

    ``prompt`` holds ``prompt_token_ids``, or ``prompt_embeds`` of shape (tokens, hidden size), or both with
    ``prompt_is_token_ids`` saying which counts where. ``params`` is a SamplingParams or PoolingParams and stays as it
    is: the request gets a copy. ``arrival_time`` is a wall-clock moment in seconds; default: now. With
    ``model_config`` (vLLM's) the ids are checked against the vocabulary, an answer without ``max_tokens`` may fill
    the context, and the model's own end tokens end it. ``resumable`` keeps the request open for more input.
    ``mm_features`` are vLLM's MultiModalFeatureSpecs, put into the order of their places in the prompt.

    Raise InvalidRequestError if the core could not serve it, or this vLLM has no such thing.
    """
    from vllm.v1.engine import EngineCoreRequest

    read = _read_prompt(prompt)
    features = _placed_features(mm_features, len(read))
    if model_config is not None:
        _check_against_model(read, params, features or (), model_config)
    sampling, pooling = _ready_params(params, len(read), model_config)
    wanted = {
        "request_id": _name(request_id),
        "prompt_token_ids": read.token_ids,
        "prompt_embeds": read.embeds,
        "prompt_is_token_ids": read.is_token_ids,
        "mm_features": features,
        "sampling_params": sampling,
        "pooling_params": pooling,
        "arrival_time": _arrival(arrival_time),
        "resumable": _flag(resumable),
        **read.passed_on,
    }
    return EngineCoreRequest(**_fields_for(EngineCoreRequest.__struct_fields__, wanted))


def _fields_for(known: Sequence[str], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The struct's fields. Raise InvalidRequestError for a value that this release has no field for."""
    fields: dict[str, Any] = {name: None for name in _REQUIRED if name in known}
    for name, value in wanted.items():
        if name in known:
            fields[name] = value
        elif value is not None and value is not False:
            raise InvalidRequestError(f"{name}: the installed vLLM's engine core has no such thing")
    return fields


def _read_prompt(prompt: Mapping[str, Any]) -> _Prompt:
    if not isinstance(prompt, Mapping):
        raise InvalidRequestError("the prompt must be a mapping with prompt_token_ids or prompt_embeds")
    given = {name: value for name, value in prompt.items() if value is not None}
    for name in given:
        if name not in _PROMPT_KEYS:
            hint = "; multimodal items come as mm_features" if str(name).startswith("m") else ""
            raise InvalidRequestError(f"the prompt's {name!r} is not known here{hint}")
    token_ids, embeds = given.get("prompt_token_ids"), given.get("prompt_embeds")
    which = given.get("prompt_is_token_ids")
    if token_ids is None and embeds is None:
        raise InvalidRequestError("the prompt has neither prompt_token_ids nor prompt_embeds")
    read = _Prompt(
        _checked_ids(token_ids) if token_ids is not None else None,
        _checked_embeds(embeds) if embeds is not None else None,
        _checked_choice(which) if which is not None else None,
        {name: _checked_extra(name, given[name]) for name in _PASSED_ON if name in given},
    )
    lengths = {len(part) for part in (read.token_ids, read.embeds, read.is_token_ids) if part is not None}
    if len(lengths) != 1:
        raise InvalidRequestError(f"the parts of the prompt differ in length: {sorted(lengths)}")
    if not len(read):
        raise InvalidRequestError("the prompt is empty")
    if (read.is_token_ids is not None) != (read.token_ids is not None and read.embeds is not None):
        raise InvalidRequestError("prompt_is_token_ids comes with prompt_token_ids and prompt_embeds, and they with it")
    return read


def _checked_ids(token_ids: Any) -> list[int]:
    if not isinstance(token_ids, list | tuple) or not all(type(each) is int for each in token_ids):
        raise InvalidRequestError("prompt_token_ids must be a list of whole numbers")
    if token_ids and min(token_ids) < 0:
        raise InvalidRequestError(f"token id {min(token_ids)} is out of the vocabulary")
    return list(token_ids)


def _checked_embeds(embeds: Any) -> Any:
    import torch

    if not isinstance(embeds, torch.Tensor) or embeds.ndim != 2 or not embeds.is_floating_point():
        raise InvalidRequestError("prompt_embeds must be a tensor of floats with the shape (tokens, hidden size)")
    return embeds


def _checked_choice(which: Any) -> list[bool]:
    if not isinstance(which, list | tuple) or not all(type(each) is bool for each in which):
        raise InvalidRequestError("prompt_is_token_ids must be a list of true and false")
    return list(which)


def _checked_extra(name: str, value: Any) -> Any:
    # The core sorts by some of these: a value of the wrong type would end it.
    if isinstance(value, bool) or not isinstance(value, _PASSED_ON[name]):
        raise InvalidRequestError(f"the prompt's {name} is of the wrong type")
    return value


def _check_vocabulary(read: _Prompt, features: Sequence[Any], vocab_size: int) -> None:
    # vLLM's own check passes ids that only its tokenizer knows; the model has no row for them.
    counts = read.is_token_ids or [True] * len(read)
    looked_up = {place: each for place, each in enumerate(read.token_ids or ()) if counts[place] and each >= vocab_size}
    for feature in features:
        # Ids at the places of an item's own rows are placeholders.
        for place in range(feature.mm_position.offset, feature.mm_position.offset + feature.mm_position.length):
            looked_up.pop(place, None)
    if looked_up:
        raise InvalidRequestError(f"token id {max(looked_up.values())} is out of the vocabulary of {vocab_size}")


def _check_against_model(read: _Prompt, params: Any, features: Sequence[Any], model_config: Any) -> None:
    if read.embeds is not None and not getattr(model_config, "enable_prompt_embeds", False):
        raise InvalidRequestError("this engine takes no prompt_embeds; it was started without enable_prompt_embeds")
    hidden_size = int(model_config.get_inputs_embeds_size())
    if read.embeds is not None and read.embeds.shape[1] != hidden_size:
        raise InvalidRequestError(f"prompt_embeds has {read.embeds.shape[1]} numbers a token; the model, {hidden_size}")
    _check_vocabulary(read, features, int(model_config.get_vocab_size()))
    longest = int(model_config.max_model_len)
    # A generated answer needs room for one token at least; a pooled one needs none.
    if len(read) > longest or (len(read) == longest and _is_sampling(params)):
        raise InvalidRequestError(f"the prompt has {len(read)} tokens; the model's context is {longest} long")


def _is_sampling(params: Any) -> bool:
    from vllm import SamplingParams

    return isinstance(params, SamplingParams)


def _ready_params(params: Any, prompt_tokens: int, model_config: Any) -> tuple[Any, Any]:
    """A checked copy of ``params``, as sampling and as pooling parameters; one of the two is None."""
    from vllm import PoolingParams, SamplingParams
    from vllm.exceptions import VLLMValidationError

    try:
        match params:
            case SamplingParams():
                return _ready_sampling(params.clone(), prompt_tokens, model_config), None
            case PoolingParams():
                return None, _ready_pooling(params.clone(), model_config)
    except (TypeError, ValueError, VLLMValidationError) as error:
        raise InvalidRequestError(str(error)) from error
    raise InvalidRequestError(f"params must be SamplingParams or PoolingParams, not {type(params).__name__}")


def _ready_sampling(params: Any, prompt_tokens: int, model_config: Any) -> Any:
    if params.n != 1:
        raise InvalidRequestError("n: the engine core makes one answer per request; build one for each")
    for name in _FRONT_ONLY:
        if getattr(params, name, None):
            raise InvalidRequestError(f"{name}: only vLLM's own front can prepare this")
    if model_config is None:
        return _ready_as_it_is(params)
    from vllm.config import StructuredOutputsConfig

    if params.structured_outputs is not None:
        check_answer_form("structured_outputs", vars(params.structured_outputs))
    tokenizer = _tokenizer_of(model_config)
    # This also chooses the grammar's backend, which the core has to know.
    params.verify(model_config, None, StructuredOutputsConfig(), tokenizer)
    check_chosen_tokens(params, int(model_config.get_vocab_size()))
    if params.max_tokens is None:
        params.max_tokens = int(model_config.max_model_len) - prompt_tokens
    if params.min_tokens > params.max_tokens:
        raise InvalidRequestError(f"min_tokens {params.min_tokens} is more than max_tokens {params.max_tokens}")
    end = tokenizer.eos_token_id if tokenizer is not None else None
    params.update_from_generation_config(model_config.try_get_generation_config(), end)
    if tokenizer is not None:
        params.update_from_tokenizer(tokenizer)
    return params


def _ready_as_it_is(params: Any) -> Any:
    for name in ("bad_words", "structured_outputs"):
        if getattr(params, name):
            raise InvalidRequestError(f"{name}: needs the tokenizer; give model_config")
    if params.max_tokens is None:
        raise InvalidRequestError("max_tokens: without a model_config its default is not known; give it")
    return params


def _ready_pooling(params: Any, model_config: Any) -> Any:
    if params.task is None:
        # vLLM's default; if the model has no such task, the core's error names those it has.
        params.task = "token_embed"
    if model_config is not None:
        params.verify(model_config)
    return params


def _tokenizer_of(model_config: Any) -> Any:
    """The model's tokenizer, read once; None if the engine was started without."""
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(model_config)


def _placed_features(mm_features: Sequence[Any] | None, prompt_tokens: int) -> list[Any] | None:
    """The features in the order of their places. Raise InvalidRequestError for a place outside the prompt."""
    if mm_features is None:
        return None
    from vllm.multimodal.inputs import MultiModalFeatureSpec

    if not isinstance(mm_features, list | tuple) or not all(isinstance(e, MultiModalFeatureSpec) for e in mm_features):
        raise InvalidRequestError("mm_features must be a list of vLLM's MultiModalFeatureSpec")
    placed = sorted(mm_features, key=lambda feature: int(feature.mm_position.offset))
    for feature in placed:
        begin, length = int(feature.mm_position.offset), int(feature.mm_position.length)
        # Items may cover each other: the sound of a video lies between its pictures.
        if begin < 0 or length < 1 or begin + length > prompt_tokens:
            raise InvalidRequestError(f"the {feature.modality} at {begin}, {length} tokens long, is outside the prompt")
    return placed


def _name(request_id: Any) -> str:
    if not isinstance(request_id, str) or not request_id:
        raise InvalidRequestError("request_id must be a text that is not empty")
    return request_id


def _arrival(arrival_time: Any) -> float:
    if arrival_time is None:
        return time.time()
    if isinstance(arrival_time, bool) or not isinstance(arrival_time, int | float) or arrival_time != arrival_time:
        raise InvalidRequestError("arrival_time must be a number of seconds")
    return float(arrival_time)


def _flag(resumable: Any) -> bool:
    if not isinstance(resumable, bool):
        raise InvalidRequestError("resumable must be true or false")
    return resumable
