"""The known part of a prompt that comes in pieces: each piece is read once, and none before its length is known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.base import StageRequest
from stage_runtime.engines.vllm.load import Model
from stage_runtime.engines.vllm.prompt import PromptReader, read_handed
from stage_runtime.engines.vllm.read_ahead import PartialPrompt
from tests.support.processes import wait_for


class Letters:
    """A tokenizer with a token for each letter, which counts what it encodes."""

    letters = 0

    def encode(self, text: str, **_options: Any) -> list[int]:
        self.letters += len(text)
        return [ord(each) % 64 for each in text]

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text, **options)}


def model(longest: int = 128, embeds_size: int = 0) -> Model:
    return Model(Letters(), longest, 640, frozenset(), embeds_size=embeds_size, dtype=torch.float32, block_size=16)


def partial(*stages: int, **payloads: Mapping[str, Any]) -> PartialPrompt:
    whole = {int(name[1:]): payload for name, payload in payloads.items()}
    request = StageRequest(key="k", request_id="r", inputs={}, params={}, payloads=whole, stream_from=stages)
    return PartialPrompt.of(request, None, None)


class Row(list[int]):
    """Token ids that count how often one of any row is looked at."""

    looked_at = 0

    def __iter__(self) -> Iterator[int]:
        for each in super().__iter__():
            Row.looked_at += 1
            yield each


@pytest.mark.attack("Z37")
def test_each_token_is_looked_at_when_it_comes_and_not_again() -> None:
    Row.looked_at = 0
    prompt, limits = partial(0), model(4096)
    for number in range(2000):
        prompt.add_piece(0, {"token_ids": Row([number % 600])}, limits, is_last=False)
    assert prompt.known == [number % 600 for number in range(2000)]
    assert Row.looked_at <= 3 * 2000


@pytest.mark.attack("Z37")
def test_text_is_read_anew_only_when_much_more_of_it_has_come() -> None:
    prompt, limits = partial(0), model(4096)
    for _ in range(2000):
        prompt.add_piece(0, {"text": "a"}, limits, is_last=False)
    assert len(prompt.known) > 1700
    assert limits.tokenizer.letters < 20 * 2000


@pytest.mark.attack("Z37")
@pytest.mark.parametrize("piece", [{"token_ids": []}, {"text": ""}, {"pieces": []}], ids=str)
def test_a_prompt_has_no_more_pieces_than_tokens(piece: Mapping[str, Any]) -> None:
    prompt, limits = partial(0), model()
    for _ in range(128):
        prompt.add_piece(0, piece, limits, is_last=False)
    with pytest.raises(InvalidRequestError, match="more pieces than this model takes tokens: 128"):
        prompt.add_piece(0, piece, limits, is_last=False)


@pytest.mark.attack("Z36")
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64])
def test_ids_without_end_are_refused_before_any_is_looked_at(dtype: torch.dtype) -> None:
    """A tensor of 16 billion, of which only one is there: to read it would take all memory."""
    endless = {"token_ids": torch.ones(1, dtype=dtype).expand(1 << 34)}
    for limits in (model(), model(embeds_size=8)):
        with pytest.raises(InvalidRequestError, match=r"maximum context length is 128 tokens.*has 17179869184"):
            read_handed([endless], limits)
        with pytest.raises(InvalidRequestError, match="maximum context length is 128 tokens"):
            partial(0).add_piece(0, endless, limits, is_last=False)


@pytest.mark.attack("Z36")
def test_embeds_without_end_are_refused_before_they_are_copied() -> None:
    limits = model(embeds_size=8)
    endless = {"prompt_embeds": torch.ones(1, 8).expand(1 << 34, 8)}
    with pytest.raises(InvalidRequestError, match="maximum context length is 128 tokens"):
        read_handed([endless], limits)
    prompt = partial(0)
    for _ in range(12):
        prompt.add_piece(0, {"prompt_embeds": torch.ones(10, 8)}, limits, is_last=False)
    with pytest.raises(InvalidRequestError, match="maximum context length is 128 tokens"):
        prompt.add_piece(0, {"prompt_embeds": torch.ones(10, 8)}, limits, is_last=False)


def test_texts_of_a_model_of_embeds_count_together_in_the_end() -> None:
    prompt, limits = partial(0), model(embeds_size=8)
    for _ in range(127):
        prompt.add_piece(0, {"text": "ab"}, limits, is_last=False)
    assert prompt.rows == 0


@pytest.mark.parametrize(
    "wrong", [torch.ones(2, 2, dtype=torch.int64), torch.tensor(7), "ab", 7, None, {"a": 1}], ids=str
)
def test_what_is_no_row_of_ids_is_refused(wrong: Any) -> None:
    for prompt in (partial(0), partial(0, p1={"token_ids": [1]})):
        with pytest.raises(InvalidRequestError, match="token_ids must be whole numbers in one row"):
            prompt.add_piece(0, {"token_ids": wrong}, model(), is_last=False)


@pytest.mark.parametrize("bad", [-1, 640, 1 << 40])
def test_a_token_out_of_the_vocabulary_is_told_of_at_once(bad: int) -> None:
    prompt = partial(0)
    prompt.add_piece(0, {"token_ids": [1]}, model(), is_last=False)
    with pytest.raises(InvalidRequestError, match="out of the vocabulary"):
        prompt.add_piece(0, {"token_ids": [bad]}, model(), is_last=False)


_PIECES = st.one_of(
    st.builds(lambda ids: {"token_ids": ids}, st.lists(st.integers(0, 600), max_size=3)),
    st.builds(lambda ids: {"prompt_token_ids": ids, "text": "x"}, st.lists(st.integers(0, 600), max_size=3)),
    st.builds(lambda ids: {"token_ids": torch.tensor(ids, dtype=torch.int64)}, st.lists(st.integers(0, 9), max_size=3)),
    st.builds(lambda ids: {"token_ids": ids, "prompt_token_ids": ids}, st.lists(st.integers(0, 9), max_size=2)),
)


@given(st.lists(st.tuples(st.integers(0, 2), _PIECES, st.booleans()), max_size=12), st.booleans())
def test_what_is_known_is_the_beginning_of_what_is_read_in_the_end(
    said: list[tuple[int, Mapping[str, Any], bool]], has_whole: bool
) -> None:
    """Pieces of the stages 0 and 2 come in any order; stage 1 has handed over whole, or comes in pieces, too."""
    limits = model()
    prompt = partial(0, 2, p1={"token_ids": [5]}) if has_whole else partial(0, 1, 2)
    for stage, piece, is_last in said:
        try:
            prompt.add_piece(stage, piece, limits, is_last=is_last)
        except InvalidRequestError:
            # Names that don't go together; the end of it would be refused, too.
            return
        if prompt.known_name:
            assert prompt.known == list(read_handed(prompt._known_parts(), limits).token_ids)


@pytest.mark.attack("Z63")
def test_a_long_text_is_not_read_anew_with_each_piece_behind_it() -> None:
    """1. a text of 60 000 characters and five thousand small ones behind it: what is read is not much more than once
    2. beyond 65 536 in all, the rest waits for the end, when it is read in a thread
    """
    prompt, limits = partial(0), model(1 << 17)
    prompt.add_piece(0, {"text": "a" * 60_000}, limits, is_last=False)
    for _ in range(5000):
        prompt.add_piece(0, {"text": "bc"}, limits, is_last=False)
    assert limits.tokenizer.letters == 60_000
    prompt.add_piece(0, {"text": "d" * 5000}, limits, is_last=True)
    assert limits.tokenizer.letters == 60_000
    whole = prompt.whole()
    assert whole is not None
    assert len(read_handed(whole.payloads.values(), limits)) == 75_000


@pytest.mark.attack("Z63")
def test_a_long_text_that_is_handed_over_is_read_in_a_thread() -> None:
    reader = PromptReader()
    try:
        for length, is_aside in ((1000, False), (65_536, True)):
            texts = [{"text": "a"}, {"text": "a" * (length - 1)}]
            request = StageRequest(key=str(length), request_id="r", payloads={0: {"pieces": texts}})
            assert reader.read_long(request, None, None, model(1 << 17), []) is is_aside
        (read,) = wait_for("the prompt", lambda: reader.take_read(waits=True))
        prompt = read.prompt.result(20)
        assert prompt is not None
        assert len(prompt) == 65_536
    finally:
        reader.close()


@pytest.mark.parametrize("pieces", [3, "ab", [3], None, {"a": 1}])
def test_pieces_that_are_none_are_refused(pieces: Any) -> None:
    with pytest.raises(InvalidRequestError, match="pieces must be a list of mappings"):
        read_handed([{"pieces": pieces}], model())


@pytest.mark.attack("Z63")
def test_texts_in_pieces_are_no_more_together_than_the_model_takes() -> None:
    """Before they are kept: the longest token of this one has eight letters."""
    prompt, limits = partial(0), model(1 << 17)
    limits.tokenizer.get_vocab = lambda: {"longests": 0, "a": 1}
    prompt.add_piece(0, {"text": "a" * 70_000}, limits, is_last=False)
    prompt.add_piece(0, {"text": "a" * 900_000}, limits, is_last=False)
    with pytest.raises(InvalidRequestError, match="the prompt has 1069000 characters"):
        prompt.add_piece(0, {"text": "a" * 99_000}, limits, is_last=False)
    assert limits.tokenizer.letters == 0


@pytest.mark.attack("Z63")
def test_behind_a_long_text_no_piece_has_all_others_gone_through() -> None:
    """Nor may token ids beside it be more than the model takes: they are read when all has come."""

    class Piece(dict[str, Any]):
        looked_at = 0

        def get(self, name: str, default: Any = None) -> Any:
            Piece.looked_at += 1
            return super().get(name, default)

    prompt, limits = partial(0), model(1 << 17)
    limits.tokenizer.get_vocab = lambda: {"longests": 0, "a": 1}
    prompt.add_piece(0, {"text": "a" * 60_000}, limits, is_last=False)
    for _ in range(20_000):
        prompt.add_piece(0, Piece(text="b"), limits, is_last=False)
    assert Piece.looked_at < 4 * 20_000
    with pytest.raises(InvalidRequestError, match="Make it shorter"):
        prompt.add_piece(0, {"text": "b", "token_ids": [1] * (1 << 20)}, limits, is_last=False)
