"""What a vLLM stage's prompt is made of; what it does not take is refused by name."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.base import StageRequest
from stage_runtime.engines.vllm.base import LlmStage
from stage_runtime.engines.vllm.load import Model
from stage_runtime.engines.vllm.prompt import Prompt, PromptReader, Reading, brings_items, read_handed, read_request

MODEL = Model(None, 128, 640, frozenset())


def _picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (2, 2)).save(file, "PNG")
    return file.getvalue()


PICTURE = _picture()


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
    """A stage whose pictures take long to be prepared; it notes which are, and which of its requests begin."""

    def __init__(self, running: int) -> None:
        self._reader, self._due = PromptReader(), []
        self._runs: Any = [None] * running
        self._reader.prepare = self._prepare
        self.goes_on, self.prepared, self.begun = threading.Semaphore(0), [], []

    def add(self, client: str, number: int) -> None:
        inputs = {"prompt_token_ids": [len(self._reader) + 1], "images": [PICTURE]}
        asked = StageRequest(f"{client}{number}", "r", inputs=inputs, params={}, client=client)
        assert self._reader.read_long(asked, None, None, replace(MODEL, takes_items=True), [])

    def _prepare(self, prompt: Prompt) -> Prompt:
        self.prepared.append(prompt.token_ids[0])
        assert self.goes_on.acquire(timeout=10)
        return prompt

    def _start_read(self, reading: Reading, prompt: Prompt | None) -> None:
        assert prompt is not None
        self.begun.append(reading.request.key)

    def step_until(self, is_so: Callable[[], bool]) -> None:
        ends_s = time.monotonic() + 10
        while not is_so():
            assert time.monotonic() < ends_s
            self._start_those_read()


@pytest.mark.attack("W2")
def test_requests_with_pictures_are_prepared_one_by_one_the_clients_in_turn() -> None:
    stage = Pictures(running=0)
    for client, number in [*(("a", each) for each in range(4)), ("b", 0), ("b", 1)]:
        stage.add(client, number)
    for count in range(6):
        stage.step_until(lambda: len(stage.prepared) == count + 1)  # noqa: B023 - it is called here
        assert len(stage.begun) == count
        stage.goes_on.release()
        stage.step_until(lambda: len(stage.begun) == count + 1)  # noqa: B023 - it is called here
    assert stage.begun == ["a0", "b0", "a1", "b1", "a2", "a3"]
    assert stage.prepared == [1, 5, 2, 6, 3, 4]


@pytest.mark.attack("X3")
def test_pictures_are_prepared_beside_the_engine_which_waits_for_none() -> None:
    """Also if the request is aborted meanwhile: the next one has its turn once the thread is done with it."""
    stage = Pictures(running=1)
    stage.add("a", 0)
    stage.add("a", 1)
    stage.step_until(lambda: stage.prepared == [1])
    began_s = time.monotonic()
    for _ in range(1000):
        stage._start_those_read()
    assert time.monotonic() - began_s < 1
    assert stage._reader.stop("a0")
    stage._start_those_read()
    assert (stage.prepared, stage.begun) == ([1], [])
    stage.goes_on.release(2)
    stage.step_until(lambda: stage.begun == ["a1"])
    assert len(stage._reader) == 0


def test_a_prepared_prompt_is_followed_by_its_answer() -> None:
    prepared = {"type": "multimodal", "prompt_token_ids": [7, 7, 5], "mm_hashes": {}}
    prompt = Prompt([5], items={}, prepared=prepared)
    assert prompt.with_answer(()) == prepared
    assert prompt.with_answer((8, 9)) == {**prepared, "prompt_token_ids": [7, 7, 5, 8, 9]}


@pytest.mark.attack("Z66")
@pytest.mark.parametrize(
    ("items", "said"),
    [
        ({"image": ["http://169.254.169.254/"]}, "hold a str: items come as numbers, arrays or tensors"),
        ({"image": "/etc/passwd"}, "hold a str"),
        ({"image": [{"deep": (b"file",)}]}, "hold a bytes"),
        ({"video": [{"video_backend": "x" * 65}]}, "hold a str"),
        ({"image": np.array(["http://a/"])}, "hold a ndarray"),
        ({"image": np.array([object()])}, "hold a ndarray"),
        ({1: 2}, "names that are no texts"),
        ({"image": [1] * 70_000}, "too many values"),
        ({"image": [{str(number): [1] * 500} for number in range(200)]}, "too many values"),
        ({"video": torch.ones(1, dtype=torch.uint8).expand(1 << 30)}, "have 1073741824 numbers"),
        ({"video": np.broadcast_to(np.uint8(0), (1 << 15, 1 << 15))}, "have 1073741824 numbers"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_items_that_are_handed_over_are_numbers_which_nothing_is_fetched_for(items: Any, said: str) -> None:
    """The model's processor would fetch a URL from wherever it leads, and open any file of this host."""
    model = Model(None, 128, 640, frozenset(), takes_items=True)
    with pytest.raises(InvalidRequestError, match=said):
        read_handed([{"token_ids": [5], "multi_modal_data": items}], model)


def test_pictures_sound_and_embeds_may_be_handed_over() -> None:
    model = Model(None, 128, 640, frozenset(), takes_items=True)
    items = {
        "image": [torch.zeros(3, 8, 8, dtype=torch.uint8), np.zeros((8, 8, 3), np.uint8)],
        "audio": (np.zeros(100, np.float32), 16_000),
        "video": [(np.zeros((2, 8, 8, 3), np.uint8), {"fps": 2.0, "video_backend": "opencv", "is_whole": True})],
        "more": {"video_embeds": torch.zeros(4, 8), "none": None},
    }
    (handed,) = handed_items = [{"token_ids": [5], "multi_modal_data": items}]
    assert read_handed(handed_items, model).items == handed["multi_modal_data"]
    request = StageRequest("k", "r", payloads={0: handed})
    assert brings_items(request, model)
    assert not brings_items(StageRequest("k", "r", payloads={0: {"token_ids": [5]}}), model)


@pytest.mark.attack("Z72")
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), 3e38, -1e10])
def test_embeds_that_are_no_numbers_are_refused(wrong: float) -> None:
    """After three such requests each answer of everybody's was wrong, until the replica was started anew."""
    model = replace(MODEL, embeds_size=4, dtype=torch.float32)
    good = torch.ones(3, 4)
    prompt = read_handed([{"prompt_embeds": good}], model)
    assert torch.equal(prompt.embeds, good)
    bad = good.clone()
    bad[2, 1] = wrong
    with pytest.raises(InvalidRequestError, match="holds what is no number, or larger"):
        read_handed([{"prompt_embeds": bad}], model)
