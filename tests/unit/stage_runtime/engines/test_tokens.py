"""How much of a client's text is encoded, for a model with a small context and for one with a large one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.prompts import read_prompt
from stage_runtime.engines.tokens import BoundedTokenizer

LONGEST_TOKEN = 8


class Tokenizer:
    """A token for each run of up to eight letters that are alike. Counts the characters that it has read."""

    def __init__(self) -> None:
        self.read = 0

    def get_vocab(self) -> dict[str, int]:
        return {"a" * size: size for size in range(1, LONGEST_TOKEN + 1)}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.read += len(text)
        tokens = [0] if add_special_tokens else []
        at = 0
        while at < len(text):
            size = next((n for n in range(1, LONGEST_TOKEN) if text[at : at + n + 1] != text[at] * (n + 1)), 8)
            tokens.append(ord(text[at]) * 10 + size)
            at += size
        return tokens

    def apply_chat_template(self, messages: list[dict[str, Any]], **_: Any) -> str:
        return "<user>" + "".join(each["content"] for each in messages)


def as_prompt(text: str) -> dict[str, Any]:
    return {"prompt": text}


def as_message(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


@pytest.mark.attack("G1")
@pytest.mark.parametrize("inputs", [as_prompt, as_message])
def test_a_text_that_no_tokens_could_make_fit_is_refused_unread(inputs: Callable[[str], dict[str, Any]]) -> None:
    tokenizer = Tokenizer()
    bounded = BoundedTokenizer(tokenizer, 256)
    with pytest.raises(InvalidRequestError, match=r"is 256 tokens, of at most 8 characters each; .* Make it sh"):
        read_prompt(bounded, inputs("a" * 2_900_000))
    assert tokenizer.read == 0


@pytest.mark.attack("G1")
@pytest.mark.parametrize("inputs", [as_prompt, as_message])
def test_reading_a_text_ends_soon_after_the_tokens_that_are_too_many(inputs: Callable[[str], dict[str, Any]]) -> None:
    """Tokens of eight characters would make it fit, and it is of tokens of one."""
    tokenizer = Tokenizer()
    bounded = BoundedTokenizer(tokenizer, 20_000)
    with pytest.raises(InvalidRequestError, match=r"length is 20000 tokens; the first 49152 characters .* are more"):
        read_prompt(bounded, inputs("ab" * 75_000))
    assert tokenizer.read == 3 * 16_384


@pytest.mark.parametrize("text", ["a" * 159_000, "a" * 79_000, "ab" * 30_000, "ab" * 9000, "a", ""])
@pytest.mark.parametrize("begins", [True, False])
def test_what_may_fit_is_encoded_whole(text: str, begins: bool) -> None:
    """Also where the pieces that were counted before cut some token into two; whether it does fit is checked later."""
    bounded = BoundedTokenizer(Tokenizer(), 20_000)
    due = Tokenizer().encode(text, add_special_tokens=begins)
    assert bounded.encode(text, add_special_tokens=begins) == due


@pytest.mark.attack("G1")
def test_the_answers_to_one_prompt_encode_it_once() -> None:
    tokenizer = Tokenizer()
    bounded = BoundedTokenizer(tokenizer, 20_000)
    for text in ("ab" * 5000, "cd" * 5000):
        answers = [read_prompt(bounded, as_prompt(text)) for _ in range(16)]
        assert answers == [Tokenizer().encode(text, add_special_tokens=True)] * 16
        # They are the requests' own: one that changes its tokens changes no other's.
        answers[0].clear()
        assert read_prompt(bounded, as_prompt(text)) == answers[1]
    assert tokenizer.read == 2 * 10_000
    # The rest of a prompt is not its begin.
    assert len(bounded.encode("cd" * 5000, add_special_tokens=False)) == len(answers[1]) - 1


@pytest.mark.attack("G1")
def test_a_refusal_is_remembered_too() -> None:
    tokenizer = Tokenizer()
    bounded = BoundedTokenizer(tokenizer, 20_000)
    for _ in range(16):
        with pytest.raises(InvalidRequestError, match="Make it shorter"):
            read_prompt(bounded, as_prompt("ab" * 75_000))
    assert tokenizer.read == 3 * 16_384


@pytest.mark.attack("Y6")
def test_the_answers_to_one_long_chat_render_it_once() -> None:
    class Counting(Tokenizer):
        rendered = 0

        def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
            self.rendered += 1
            return super().apply_chat_template(messages, **options)

    tokenizer = Counting()
    bounded = BoundedTokenizer(tokenizer, 20_000)
    chats = [{"messages": [{"role": "user", "content": word}] * 100} for word in ("ab", "cd")]
    for chat in chats:
        answers = [read_prompt(bounded, {"messages": [dict(each) for each in chat["messages"]]}) for _ in range(16)]
        assert (
            answers
            == [Tokenizer().encode("<user>" + chat["messages"][0]["content"] * 100, add_special_tokens=False)] * 16
        )
    assert tokenizer.rendered == 2
    # Other options make another text.
    bounded.apply_chat_template(chats[1]["messages"], tools=[{}])
    assert tokenizer.rendered == 3
