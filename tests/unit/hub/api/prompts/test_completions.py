"""The body of a text completion."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hub.api.prompts.completions import CompletionRequest, parse_completion
from omni_discovery.errors import InvalidRequestError


def body(prompt: Any, **fields: Any) -> bytes:
    return json.dumps({"prompt": prompt, **fields}).encode()


@pytest.mark.parametrize(
    ("prompt", "inputs"),
    [
        ("", [{"prompt": ""}]),
        ("a", [{"prompt": "a"}]),
        (["a", "b"], [{"prompt": "a"}, {"prompt": "b"}]),
        ([5, 0], [{"prompt_token_ids": [5, 0]}]),
        ([[5], "a"], [{"prompt_token_ids": [5]}, {"prompt": "a"}]),
    ],
)
def test_a_prompt_may_be_text_or_tokens_one_or_several(prompt: Any, inputs: list[dict[str, Any]]) -> None:
    assert parse_completion(body(prompt)).prompts == inputs


@pytest.mark.parametrize("prompt", [[], [[]], ["a", []], [1, "a"], [[1], 2]])
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match="'prompt' is a text"):
        parse_completion(body(prompt))


@pytest.mark.parametrize("prompt", [[None], [True], [-1], [1 << 31], [1.5], [["a"]], [[1 << 31]], {}, 5])
def test_a_prompt_with_something_else_in_it_is_refused_with_its_place(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"the body can't be used: .* - at '\$\.prompt"):
        parse_completion(body(prompt))


@pytest.mark.attack("G5")
@pytest.mark.parametrize("several", [False, True])
def test_the_token_ids_of_a_body_are_bounded(several: bool) -> None:
    """A body could hold 1.5 million short ones, and each of 16 answers sends them on."""

    def prompt(size: int) -> Any:
        return [[1] * (size // 2)] * 2 if several else [1] * size

    assert len(parse_completion(body(prompt(1 << 19))).prompts) == 1 + several
    with pytest.raises(InvalidRequestError, match="'prompt' has 524290 token ids; 524288 are the most"):
        parse_completion(body(prompt((1 << 19) + 2)))


@pytest.mark.attack("G5")
def test_the_prompts_are_made_once() -> None:
    asked = parse_completion(body([1] * 1000, n=16))
    assert asked.prompts is asked.prompts


def test_the_answers_to_all_prompts_are_bounded() -> None:
    assert parse_completion(body(["a"] * 32, n=2)).n == 2
    with pytest.raises(InvalidRequestError, match="66 answers"):
        parse_completion(body(["a"] * 33, n=2))


@pytest.mark.attack("S4")
def test_a_great_many_prompts_are_counted_before_anything_is_made_of_them() -> None:
    """A million empty ones fit into a body: as many inputs of requests took 0.75 s, and the loop with it."""
    asked = CompletionRequest(prompt=[""] * 65)
    with pytest.raises(InvalidRequestError, match="65 answers were asked for"):
        _ = asked.prompts
