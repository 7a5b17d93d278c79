"""What a program may give to ``generate``: prompts and parameters in several forms, and vLLM's own arguments."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hub.asked import arranged, check_unread, inputs_of, plain_params
from omni_discovery.errors import InvalidRequestError


class SamplingParams(msgspec.Struct):
    """As vLLM's class looks from outside."""

    n: int = 1
    temperature: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    output_kind: int = 0
    _all_stop_token_ids: set[int] = msgspec.field(default_factory=set)


@pytest.mark.parametrize(
    ("prompt", "inputs"),
    [
        ("hi", {"prompt": "hi"}),
        ([1, 2], {"prompt_token_ids": [1, 2]}),
        ([{"role": "user", "content": "hi"}], {"messages": [{"role": "user", "content": "hi"}]}),
        ({"prompt": "hi", "images": []}, {"prompt": "hi", "images": []}),
    ],
)
def test_a_prompt_is_a_text_token_ids_messages_or_a_mapping(prompt: Any, inputs: dict[str, Any]) -> None:
    assert inputs_of(prompt) == inputs


@pytest.mark.parametrize("prompt", [None, 5, b"hi", [], [1, "a"], object()])
def test_any_other_prompt_is_refused_with_what_would_be_right(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match="a prompt is a text, a list of token ids"):
        inputs_of(prompt)


def test_parameters_of_vllm_become_those_that_were_set() -> None:
    assert plain_params(SamplingParams(temperature=0.5, seed=3, output_kind=2)) == {"temperature": 0.5, "seed": 3}
    assert plain_params({"temperature": 0.0}) == {"temperature": 0.0}
    assert plain_params(None) is None
    with pytest.raises(InvalidRequestError, match="n: one answer"):
        plain_params(SamplingParams(n=2))
    with pytest.raises(InvalidRequestError, match="not int"):
        plain_params(5)


@pytest.mark.parametrize(
    ("request_id", "each", "one", "found"),
    [
        (None, None, None, (None, None)),
        ("r", [{"seed": 1}, None], None, ("r", [{"seed": 1}, None])),
        ("r", [SamplingParams(seed=1)], None, ("r", [{"seed": 1}])),
        # vLLM's order: prompt, sampling_params, request_id.
        (SamplingParams(seed=1), "r", None, ("r", [{"seed": 1}])),
        ([{"seed": 1}, {"seed": 2}], "r", None, ("r", [{"seed": 1}, {"seed": 2}])),
        ("r", None, {"seed": 1}, ("r", [{"seed": 1}])),
        (None, None, [SamplingParams(), None], (None, [{}, None])),
    ],
)
def test_both_orders_of_id_and_parameters_are_understood(request_id: Any, each: Any, one: Any, found: Any) -> None:
    assert arranged(request_id, each, one) == found


@pytest.mark.parametrize(
    ("request_id", "each", "one", "said"),
    [
        ("r", {"seed": 1}, None, "one entry for each stage"),
        ("r", "other", None, "one entry for each stage"),
        ("r", [{}], {}, "not both"),
        ({}, [{}], None, "prompt, a request_id"),
    ],
)
def test_what_can_not_be_meant_is_refused(request_id: Any, each: Any, one: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        arranged(request_id, each, one)


def test_arguments_of_vllm_that_nobody_could_follow_are_refused_by_name() -> None:
    check_unread({"lora_request": None, "session_id": "s", "prompt_text": "hi", "reasoning_ended": True})
    for name in ("lora_request", "tokenization_kwargs", "data_parallel_rank", "kv_hints"):
        with pytest.raises(InvalidRequestError, match=f"^{name}: "):
            check_unread({name: 0})
    with pytest.raises(TypeError, match="unexpected keyword argument 'temprature'"):
        check_unread({"temprature": 0})
