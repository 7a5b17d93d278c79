"""What a vLLM stage's prompt is made of; what it does not take is refused by name."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.base import StageRequest
from stage_runtime.engines.vllm.base import LlmStage
from stage_runtime.engines.vllm.load import Model
from stage_runtime.engines.vllm.prompt import Prompt, PromptReader, Reading, read_request

MODEL = Model(None, 128, 640, frozenset())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"mm_features": []}, "mm_features: this stage does not read it"),
        ({"mm_processor_kwargs": {"num_crops": 4}}, "mm_processor_kwargs: this stage does not read it"),
        ({"multi_modal_uuids": {"image": ["x"]}}, "multi_modal_uuids: this stage does not read it"),
        ({"multi_modal_data": {"image": b"x"}}, "multi_modal_data: give pictures as image_url parts"),
        ({"audios": [b"x"]}, "audios: this stage's model takes no pictures"),
    ],
)
def test_nothing_beside_a_prompt_is_dropped_in_silence(more: dict[str, Any], said: str) -> None:
    asked = StageRequest("a", "a", inputs={"prompt_token_ids": [5], **more}, params={})
    with pytest.raises(InvalidRequestError, match=said):
        read_request(asked, MODEL, [])


def test_a_prompt_alone_is_taken() -> None:
    asked = StageRequest("a", "a", inputs={"prompt_token_ids": [5], "mm_features": None}, params={})
    assert list(read_request(asked, MODEL, []).token_ids) == [5]


class Pictures(LlmStage):
    """A stage whose pictures take long to begin; it notes when its requests do."""

    def __init__(self, running: int) -> None:
        self._reader, self._due, self._items_due_s = PromptReader(), [], 0.0
        self._runs: Any = [None] * running
        self.begun: list[str] = []

    def add(self, client: str, number: int) -> None:
        inputs = {"prompt": "x", "images": [b"x"]}
        asked = StageRequest(f"{client}{number}", "r", inputs=inputs, params={}, client=client)
        assert self._reader.read_long(asked, None, None, replace(MODEL, takes_items=True), [])

    def _start_read(self, reading: Reading, prompt: Prompt | None) -> None:
        time.sleep(0.05)
        self.begun.append(reading.request.key)


@pytest.mark.attack("W2")
def test_requests_with_pictures_begin_one_by_one_the_clients_in_turn() -> None:
    stage = Pictures(running=0)
    for client, number in [*(("a", each) for each in range(4)), ("b", 0), ("b", 1)]:
        stage.add(client, number)
    for count in range(6):
        assert len(stage.begun) == count
        stage._start_those_read()
    assert stage.begun == ["a0", "b0", "a1", "b1", "a2", "a3"]


@pytest.mark.attack("W2")
def test_behind_each_of_them_those_that_run_have_the_engine_as_long() -> None:
    stage = Pictures(running=1)
    for number in range(3):
        stage.add("a", number)
    steps, began_s = 0, time.monotonic()
    while len(stage.begun) < 3:
        stage._start_those_read()
        steps += 1
    # Three of them, and two rests.
    assert time.monotonic() - began_s > 0.24
    assert steps > 3
