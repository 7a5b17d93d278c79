"""When vLLM is asked how likely a prompt was: once for an answer, and only where it can tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from omni_discovery.errors import InvalidRequestError
from omni_discovery.wire import MAX_PROMPT_LOGPROBS
from stage_runtime.engines.base import StageRequest
from stage_runtime.engines.vllm.handoff import Answer
from stage_runtime.engines.vllm.prompt import Prompt
from stage_runtime.engines.vllm.prompt_logprobs import ask, settle
from stage_runtime.engines.vllm.resume import stop_reason_of


def params_of(prompt_logprobs: int | None) -> Any:
    """As vLLM makes them: it leaves its prefix cache unread for a prompt's log probabilities."""
    return SimpleNamespace(
        prompt_logprobs=prompt_logprobs, skip_reading_prefix_cache=prompt_logprobs is not None, ignore_eos=False
    )


def config(*, fast: bool = False) -> Any:
    return SimpleNamespace(cache_config=SimpleNamespace(kv_sharing_fast_prefill=fast))


def answer_of(params: Any, prompt: Prompt, said: int = 0) -> Answer:
    return Answer(StageRequest("k", "r"), prompt, params, token_ids=[7] * said)


@pytest.mark.parametrize("asked", [None, 0, 5])
@pytest.mark.parametrize("next_stages", [(), (1,)])
def test_behind_a_pause_the_cache_is_read_unless_all_hidden_states_are_wanted(
    asked: int | None, next_stages: tuple[int, ...]
) -> None:
    """1. nothing is said yet: the prompt's are asked for, from a model that reads all of it
    2. the answer has begun: they have come, and only what the next stage wants keeps the cache unread
    """
    params = params_of(asked)
    settle(params, StageRequest("k", "r", next_stages=next_stages), config(), is_split=False, keeps_rows=True)
    first, later = (SimpleNamespace(**vars(params)) for _ in range(2))
    ask(first, answer_of(params, Prompt([1, 2, 3])))
    assert first.prompt_logprobs == asked
    assert first.skip_reading_prefix_cache is (asked is not None or bool(next_stages))
    ask(later, answer_of(params, Prompt([1, 2, 3]), said=1))
    assert later.prompt_logprobs is None
    assert later.skip_reading_prefix_cache is bool(next_stages)


@pytest.mark.parametrize(
    ("fields", "fast", "split", "said"),
    [
        ({}, False, True, "split into prefill and decode"),
        ({"stream_from": (0,)}, False, False, "in pieces"),
        ({"segment": 0}, False, False, "in pieces"),
        ({}, True, False, "kv_sharing_fast_prefill"),
    ],
)
def test_a_stage_that_cant_tell_them_refuses_by_name(
    fields: dict[str, Any], fast: bool, split: bool, said: str
) -> None:
    """And takes the same request without."""
    request = StageRequest("k", "r", **fields)
    with pytest.raises(InvalidRequestError, match=f"^prompt_logprobs: .*{said}"):
        settle(params_of(0), request, config(fast=fast), is_split=split, keeps_rows=False)
    settle(params_of(None), request, config(fast=fast), is_split=split, keeps_rows=False)


def test_more_than_travels_is_refused_with_the_bound() -> None:
    most = MAX_PROMPT_LOGPROBS // 4
    ask(params_of(3), answer_of(params_of(3), Prompt([1] * most)))
    with pytest.raises(InvalidRequestError, match=f"^prompt_logprobs: 3 and its own.* {MAX_PROMPT_LOGPROBS} "):
        ask(params_of(3), answer_of(params_of(3), Prompt([1] * (most + 1))))


def test_embeds_have_no_likelihood() -> None:
    embeds = SimpleNamespace(shape=(3, 8))
    with pytest.raises(InvalidRequestError, match="no tokens"):
        ask(params_of(0), answer_of(params_of(0), Prompt(embeds=embeds)))


@pytest.mark.parametrize(("last", "ignore_eos", "due"), [(1, False, None), (1, True, 1), (9, False, 9)])
def test_an_answer_that_was_shown_to_its_end_has_the_token_that_stopped_it(
    last: int, ignore_eos: bool, due: int | None
) -> None:
    """The model's usual end is no reason, unless the request has named it and not that."""
    params, model = params_of(None), SimpleNamespace(tokenizer=SimpleNamespace(eos_token_id=1))
    params.ignore_eos = ignore_eos
    assert stop_reason_of((5, last), params, model) == due  # type: ignore[arg-type]
