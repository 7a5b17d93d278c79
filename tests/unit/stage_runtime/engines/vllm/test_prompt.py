"""What a vLLM stage's prompt is made of; what it does not take is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.base import StageRequest
from stage_runtime.engines.vllm.load import Model
from stage_runtime.engines.vllm.prompt import read_request

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
