"""Input in segments at the engines: each is answered as by one request with all before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.base import Engine, EngineOutput, StageRequest, create_engine
from tests.support.engines import ECHO, PAINTER, THINKER, as_the_supervisor_has_it, run

torch.set_num_threads(1)

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}
SEGMENTS: tuple[dict[str, Any], ...] = (
    {"prompt": "draw a 7"},
    {"prompt_token_ids": [5, 9, 30]},
    {"prompt": " and then"},
)


@pytest.fixture(scope="module")
def thinker() -> Iterator[Engine]:
    with as_the_supervisor_has_it():
        engine = create_engine(THINKER)
        engine.load(lambda _phase, _progress: None)
        yield engine
        engine.close()


def until_end(engine: Engine, key: str) -> list[EngineOutput]:
    said: list[EngineOutput] = []
    for _ in range(10_000):
        said += [output for output in engine.step() if output.key == key]
        if said and said[-1].finished:
            return said
    raise AssertionError("the segment never ends")


def tokens(outputs: list[EngineOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_each_segment_is_answered_as_one_request_with_the_whole_conversation(thinker: Engine) -> None:
    """1. three segments, each when the one before was answered
    2. each answer is, token for token, that of one new request whose prompt is all that was asked and answered before
    3. each segment's usage counts what it brought itself
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(THINKER.model)
    said_so_far: list[int] = []
    for number, inputs in enumerate(SEGMENTS):
        request = StageRequest("talk", "r", inputs=inputs, params=GREEDY, segment=number)
        text = inputs.get("prompt")
        new = list(inputs.get("prompt_token_ids") or tokenizer.encode(text, add_special_tokens=number == 0))
        (thinker.update if number else thinker.add)(request)  # type: ignore[attr-defined]
        answer = until_end(thinker, "talk")
        joined = StageRequest("joined", "j", inputs={"prompt_token_ids": [*said_so_far, *new]}, params=GREEDY)
        assert tokens(answer) == tokens(run(thinker, joined)["joined"])
        assert tokens(answer)
        assert answer[-1].usage == {"prompt_tokens": len(new), "completion_tokens": len(tokens(answer))}
        said_so_far += [*new, *tokens(answer)]
    assert not thinker.has_unfinished()
    thinker.abort("talk")
    assert not thinker.has_unfinished()


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_a_conversation_that_was_forgotten_begins_anew_and_a_too_long_one_is_refused(thinker: Engine) -> None:
    first = StageRequest("talk", "r", inputs={"prompt": "draw a 7"}, params=GREEDY, segment=0)
    thinker.add(first)
    alone = tokens(until_end(thinker, "talk"))
    thinker.abort("talk")
    thinker.add(first)
    assert tokens(until_end(thinker, "talk")) == alone
    long = StageRequest("talk", "r", inputs={"prompt_token_ids": [5] * 120}, params=GREEDY, segment=1)
    with pytest.raises(InvalidRequestError, match="context length"):
        thinker.update(long)  # type: ignore[attr-defined]
    thinker.abort("talk")


def test_an_echo_says_each_segment_by_itself() -> None:
    engine = create_engine(ECHO)
    first = StageRequest("talk", "r", inputs={"prompt": "to be"}, segment=0)
    assert "".join(output.text for output in run(engine, first)["talk"]) == "to be"
    engine.update(replace(first, inputs={"prompt": "or not"}, segment=1))  # type: ignore[attr-defined]
    assert "".join(output.text for output in until_end(engine, "talk")) == "or not"


def test_a_painter_draws_each_segment_as_it_would_alone() -> None:
    engine = create_engine(PAINTER)
    engine.load(lambda _phase, _progress: None)
    request = StageRequest("talk", "r", params={"steps": 2, "seed": 1}, segment=0)

    def asked(digit: int) -> dict[int, dict[str, torch.Tensor]]:
        return {0: {"token_ids": torch.tensor([3, 4 + digit, 1])}}

    first = run(engine, replace(request, payloads=asked(3)))["talk"][-1].image_png
    engine.update(replace(request, payloads=asked(7), segment=1))  # type: ignore[attr-defined]
    second = until_end(engine, "talk")[-1].image_png
    alone = run(engine, replace(request, key="alone", payloads=asked(7)))["alone"][-1].image_png
    assert second == alone
    assert first != second
    engine.close()
