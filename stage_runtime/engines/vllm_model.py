"""What of a loaded model decides what its stage takes, and how an answer goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omni_discovery.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Model:
    """Read from vLLM once it has loaded."""

    tokenizer: Any
    max_model_len: int
    vocab_size: int
    #: What ends an answer unless the request ignores it.
    eos_token_ids: frozenset[int]
    has_logits_processors: bool = False
    #: How many numbers a token has in prompt embeds, and of which type; 0: it takes none.
    embeds_size: int = 0
    dtype: Any = None
    #: How many tokens are remembered together by the prefix cache; 0: none are.
    block_size: int = 0
    #: Whether it takes pictures, sound or other items beside its prompt; which, vLLM knows.
    takes_items: bool = False
    #: How many tokens an answer has at least: none where the stage pools.
    least_answer: int = 1


def describe_model(llm: Any, tokenizer: Any, given: Mapping[str, Any]) -> Model:
    """The model of a loaded LLMEngine; ``given`` are the stage's engine_args."""
    config, cache = llm.vllm_config.model_config, llm.vllm_config.cache_config
    # As vLLM itself finds out what ends an answer.
    more = config.try_get_generation_config().get("eos_token_id")
    eos = [tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])]
    return Model(
        tokenizer=tokenizer,
        max_model_len=int(config.max_model_len),
        vocab_size=int(config.get_vocab_size()),
        eos_token_ids=frozenset(int(each) for each in eos if each is not None),
        has_logits_processors=bool(given.get("logits_processors")),
        embeds_size=int(config.get_inputs_embeds_size()) if config.enable_prompt_embeds else 0,
        dtype=config.dtype,
        block_size=int(cache.block_size) if cache.enable_prefix_caching else 0,
        takes_items=bool(config.is_multimodal_model),
    )


def details_of(llm: Any) -> dict[str, str]:
    """What the replica's record says of the model that a loaded LLMEngine has."""
    config = llm.vllm_config.model_config
    dtype, commit = str(config.dtype).removeprefix("torch."), getattr(config.hf_config, "_commit_hash", None)
    return {"dtype": dtype, "revision": str(config.revision or commit or "")}


def id_of_token(tokenizer: Any, token: str, where: str) -> int | None:
    """The id of a token that the operator named, None for the empty one. Raise ConfigError if it is not one token."""
    if not token:
        return None
    token_id = tokenizer.convert_tokens_to_ids(token)
    if token_id is None or token_id == tokenizer.unk_token_id:
        raise ConfigError(f"{where}: {token!r} is not one token of the model")
    return int(token_id)
