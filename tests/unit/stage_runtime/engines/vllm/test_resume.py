"""An answer that another replica began, as a replica reads it: the same text, and no more work than the text is."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omni_discovery.wire import Resume
from stage_runtime.config import NotResumableError
from stage_runtime.engines.base import StageRequest
from stage_runtime.engines.vllm.handoff import Answer
from stage_runtime.engines.vllm.interrupt import take_over
from stage_runtime.engines.vllm.load import Model
from stage_runtime.engines.vllm.prompt import Prompt
from stage_runtime.engines.vllm.resume import ResumableDetokenizer
from stage_runtime.engines.vllm.sampling_params import sampling_params

#: A token without any text, as the first byte of a character is.
WORDLESS = 0


class Stream:
    """vLLM's detokenizer, with a letter for each token; counts how many tokens it has read anew."""

    def __init__(self) -> None:
        self.pending = self.work = 0
        self.new = ""

    def update(self, token_ids: list[int], stop_terminated: bool) -> None:
        assert not stop_terminated or token_ids
        for token_id in token_ids:
            self.pending += 1
            self.work += self.pending
            if token_id != WORDLESS:
                self.new += chr(token_id)
                self.pending = 0

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        assert delta
        text, self.new = self.new, ""
        return text


def replayed(
    token_ids: Sequence[int], text: str, *, stopped: bool = False, special: frozenset[int] = frozenset()
) -> int:
    """How many tokens were read, each with those before it that made no text."""
    detokenizer = ResumableDetokenizer.__new__(ResumableDetokenizer)
    detokenizer._stream, detokenizer._silent = (stream := Stream()), special
    detokenizer.replay(Resume(token_ids=tuple(token_ids), text=text), stopped=stopped)
    return stream.work


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 256, 1000])
def test_the_text_is_compared_as_a_whole(count: int) -> None:
    tokens = [97 + number % 26 for number in range(count)]
    text = "".join(map(chr, tokens))
    replayed(tokens, text, stopped=bool(count))
    with pytest.raises(NotResumableError, match="other text"):
        replayed(tokens, f"{text}x")


@pytest.mark.attack("Z65")
def test_tokens_without_text_are_read_for_a_while_only() -> None:
    """1. a hundred of them are characters of several tokens; 2. of a hundred thousand hardly any is read"""
    assert replayed([*[WORDLESS] * 100, 97], "a") == 101 * 102 // 2
    with pytest.raises(NotResumableError, match="no text"):
        replayed([97, *[WORDLESS] * 100_000], "a")
    most = [*[WORDLESS] * 127, 97, 97, *[WORDLESS] * 127] * 100
    assert replayed(most, "aa" * 100) < len(most) * 256


def test_an_answer_of_special_tokens_is_gone_on_with() -> None:
    """As of a model that speaks: they make no text by themselves, and are left out."""
    tokens = [WORDLESS] * 10_000
    tokens[5000] = 97
    assert replayed(tokens, "a", special=frozenset([WORDLESS])) < 10
    assert replayed(tokens, "a", special=frozenset([WORDLESS]), stopped=True) < 10


@pytest.mark.attack("Z65")
def test_no_more_is_gone_on_with_than_the_model_takes() -> None:
    model = Model(SimpleNamespace(encode=lambda *_, **__: [1]), 128, 640, frozenset(), dtype=torch.float32)
    resume = Resume(token_ids=(97,) * 126, text="a" * 126)
    request: Any = StageRequest("k", "r", resume=resume)
    answer = Answer(request, Prompt([1, 2, 3]), sampling_params({}), None)
    with pytest.raises(NotResumableError, match="other prompt"):
        take_over(answer, model)
    assert answer.token_ids == []


@pytest.mark.attack("Z83")
@pytest.mark.parametrize("token_id", [-1, 640, 1 << 40])
def test_no_answer_is_gone_on_with_that_has_tokens_of_no_model(token_id: int) -> None:
    """A tokenizer may know them; the model would read beyond its table, in the step of all requests."""
    model = Model(SimpleNamespace(encode=lambda *_, **__: [1]), 128, 640, frozenset(), dtype=torch.float32)
    request: Any = StageRequest("k", "r", resume=Resume(token_ids=(97, token_id), text="ax"))
    with pytest.raises(NotResumableError, match="other text"):
        take_over(Answer(request, Prompt([1, 2, 3]), sampling_params({}), None), model)
