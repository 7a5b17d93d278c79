"""What engines read of a client's input, and what they refuse rather than drop."""

from __future__ import annotations

import json
from typing import Any

import pytest

from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.prompts import check_unread, prompt_text, read_prompt, reading_size


class Tokenizer:
    """One token for each character."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert add_special_tokens
        return [ord(each) for each in text]


def test_a_prompt_is_read_as_tokens_or_as_text() -> None:
    assert read_prompt(Tokenizer(), {"prompt": "ab", "mm_features": None}) == [97, 98]
    assert read_prompt(Tokenizer(), {"prompt_token_ids": [1, 2]}) == [1, 2]
    assert prompt_text({"prompt": "a cat"}) == "a cat"
    assert prompt_text({"prompt": "a" * 65_536})
    with pytest.raises(InvalidRequestError, match="65537 characters; at most 65536 are drawn"):
        prompt_text({"prompt": "a" * 65_537})


class Templated(Tokenizer):
    """Its chat template writes what it is given."""

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        return json.dumps([messages, options.get("tools")])

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(each) for each in text]


def test_a_chat_template_gets_tools_and_the_arguments_of_calls_as_objects() -> None:
    """Clients write them as text; what is no JSON stays as it is."""
    calls = [{"function": {"name": "add", "arguments": each}} for each in ('{"a": 1}', "{a", {"a": 2})]
    messages = [{"role": "assistant", "content": None, "tool_calls": [*calls, "odd"]}]
    tools = [{"type": "function", "function": {"name": "add"}}]
    written = "".join(map(chr, read_prompt(Templated(), {"messages": messages}, tools=tools)))
    ((message,), shown) = json.loads(written)
    assert [each["function"]["arguments"] for each in message["tool_calls"][:3]] == [{"a": 1}, "{a", {"a": 2}]
    assert (message["tool_calls"][3], shown) == ("odd", tools)
    assert json.loads("".join(map(chr, read_prompt(Templated(), {"messages": messages}))))[1] is None


def test_a_stage_that_calls_nothing_refuses_tools() -> None:
    asked = {"prompt": "a", "tools": [{"type": "function"}]}
    for read in (check_unread, prompt_text):
        with pytest.raises(InvalidRequestError, match="tools: this stage calls none"):
            read(asked)
    check_unread(asked, reads_tools=True)
    check_unread({"prompt": "a", "tools": []})


@pytest.mark.parametrize("name", ["mm_features", "mm_processor_kwargs", "multi_modal_uuids", "mm_hashes"])
def test_what_a_front_end_of_vllm_makes_of_items_is_refused_by_name(name: str) -> None:
    """Dropped in silence, it would have the model answer to something else."""
    for read in (check_unread, prompt_text):
        with pytest.raises(InvalidRequestError, match=f"^{name}: this stage does not read it"):
            read({"prompt": "what is this?", name: {"fps": 2}})


@pytest.mark.parametrize(
    ("inputs", "size"),
    [
        ({"prompt": "abc"}, 3),
        (
            {"messages": [{"role": "user", "content": "abc"}, {"content": [{"type": "text", "text": "de"}]}]},
            5 + 2 * 256,
        ),
        ({"prompt_token_ids": [1, 2]}, 0),
        ({"messages": ["abc", {"content": 5}, {"content": [1, {"text": 5}, {"type": "image"}]}, {}]}, 5 * 256),
        ({"prompt": 5, "messages": {}}, 0),
        ({"messages": [{"role": "assistant", "tool_calls": ["abc"]}]}, 256 + len("{'tool_calls': ['abc']}")),
    ],
)
def test_the_size_of_a_text_is_known_before_it_is_checked(inputs: dict[str, Any], size: int) -> None:
    assert reading_size(inputs) == size
