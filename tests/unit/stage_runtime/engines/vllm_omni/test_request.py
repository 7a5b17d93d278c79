"""What a client's request becomes for a thinker: a chat, a voice, and what may be said of its items' processing."""

from __future__ import annotations

from typing import Any

import pytest

from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.base import StageRequest
from stage_runtime.engines.vllm_omni.request import as_chat, read_processing, read_voice
from stage_runtime.engines.vllm_omni.talker import Talker

TALKER = Talker(hidden_size=8, vocabulary=200, voices=("ethan", "chelsie"))


def test_a_prompt_that_begins_no_turn_is_the_users_message() -> None:
    assert as_chat({"prompt": "hi"})["messages"] == [{"role": "user", "content": "hi"}]
    beside = as_chat({"prompt": "hi"}, {"image": [1, 2], "audio": [3]})["messages"][0]["content"]
    assert [part["type"] for part in beside] == ["image", "image", "audio", "text"]
    for others in (
        {"prompt": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"},
        {"prompt": "hi", "messages": [{"role": "user", "content": "both"}]},
        {"prompt_token_ids": [1]},
        {"prompt": ""},
        {"prompt": 7},
        {},
    ):
        assert as_chat(others) == others


def told(params: dict[str, Any], talker: Talker | None = TALKER, **inputs: Any) -> dict[str, Any]:
    return read_voice(StageRequest("a", "a", inputs=inputs, params=params), talker)


def test_a_voice_comes_as_parameter_or_as_vllm_omni_has_it() -> None:
    assert told({}) == told({"speaker": None}) == {}
    assert told({"speaker": "Ethan"}) == {"speaker": ["ethan"]}
    assert told({"speaker": "ethan"}, additional_information={"speaker": ["chelsie"]}) == {"speaker": ["chelsie"]}


@pytest.mark.parametrize(
    ("params", "inputs", "talker", "said"),
    [
        ({"speaker": "nobody"}, {}, TALKER, "speaker: this model has ethan, chelsie"),
        ({"language": "English"}, {}, TALKER, "language: this model does not take it"),
        ({"speaker": "ethan"}, {}, None, "speaker: this model does not take it"),
        ({}, {"additional_information": {"ref_audio": ["x"]}}, TALKER, "ref_audio: this model does not take it"),
        ({}, {"additional_information": {"speaker": ["a", "b"]}}, TALKER, "one value is right, not 2"),
        ({}, {"additional_information": "x"}, TALKER, "additional_information is a mapping"),
    ],
)
def test_what_a_talker_does_not_take_is_refused_by_name(
    params: dict[str, Any], inputs: dict[str, Any], talker: Talker | None, said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        told(params, talker, **inputs)


def test_only_named_settings_of_the_processors_come_from_a_client() -> None:
    assert not read_processing({}).use_audio_in_video
    assert read_processing({"mm_processor_kwargs": {"use_audio_in_video": True}}).use_audio_in_video
    for wrong in ({"size": {}}, {"use_audio_in_video": 1}, "x", ["use_audio_in_video"]):
        with pytest.raises(InvalidRequestError, match="mm_processor_kwargs: "):
            read_processing({"mm_processor_kwargs": wrong})
