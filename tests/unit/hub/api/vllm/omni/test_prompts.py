"""What becomes of the prompts that vLLM-Omni's server makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hub.api.errors import NotServedError
from hub.api.vllm.omni.prompts import inputs_of


def words(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))


def test_text_and_tokens_reach_the_first_stage_as_they_are() -> None:
    assert inputs_of("hello", None) == ({"prompt": "hello"}, {})
    chat = {"type": "token", "prompt_token_ids": [5, 6], "prompt": "hi", "arrival_time": 1.0, "cache_salt": None}
    assert inputs_of(chat, None) == ({"prompt_token_ids": [5, 6]}, {})


def test_a_stage_that_speaks_gets_the_text() -> None:
    """Its own if the prompt has one, else that of the tokens; none beside what an adapter has prepared."""
    assert inputs_of({"prompt_token_ids": [5, 6], "prompt": "hi"}, words) == ({"prompt": "hi"}, {})
    assert inputs_of({"prompt_token_ids": [5, 6]}, words) == ({"prompt": "5 6"}, {})
    told = {"text": ["hello"], "speaker": ["ethan"], "instruct": None}
    notes = {"voice_created_at": [3], "max_new_tokens": [2048], "_qwen3_tts_effective_max_tokens": [24]}
    inputs, _ = inputs_of({"prompt_token_ids": [1, 1], "additional_information": {**told, **notes}}, words)
    assert inputs == {
        "prompt_token_ids": [1, 1],
        "additional_information": {"text": ["hello"], "speaker": ["ethan"]},
    }


def test_a_chat_that_is_said_keeps_its_text_beside_its_voice() -> None:
    told = {"additional_information": {"speaker": ["ethan"]}}
    assert inputs_of({"prompt_token_ids": [5, 6], **told}, words) == ({"prompt": "5 6", **told}, {})


def test_what_a_picture_should_be_goes_to_the_stages_that_draw() -> None:
    prompt: dict[str, Any] = {"prompt": "a cat", "modalities": ["image"], "negative_prompt": "fog"}
    sizes = {"height": 64, "width": 32, "mm_processor_kwargs": {"target_h": 64, "target_w": 32}}
    drawn = {"negative_prompt": "fog", "height": 64, "width": 32}
    assert inputs_of({**prompt, **sizes}, None) == ({"prompt": "a cat"}, drawn)


def test_a_chat_with_files_reaches_the_first_stage_as_it_came() -> None:
    """In place of the prompt that the server made of its text; with the voice."""
    chat = {"messages": [{"role": "user", "content": "hi"}], "mm_processor_kwargs": {"use_audio_in_video": True}}
    prompt = {"prompt_token_ids": [5], "additional_information": {"speaker": ["ethan"]}}
    assert inputs_of(prompt, None, chat) == ({**chat, "additional_information": {"speaker": ["ethan"]}}, {})


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (["one", "two"], "several prompts"),
        ({"prompt": "a", "multi_modal_data": {"audio": b""}}, "multi_modal_data can't be told to a stage"),
        ({"prompt": "a", "mm_processor_kwargs": {"fps": 2}}, "mm_processor_kwargs: fps"),
        ({"prompt_token_ids": [1], "additional_information": {"ref_audio": [object()]}}, "ref_audio can't be told"),
        ({"prompt_token_ids": [1], "additional_information": "loud"}, "is a mapping"),
    ],
)
def test_what_no_stage_reads_is_refused_by_its_name(prompt: Any, said: str) -> None:
    with pytest.raises(NotServedError, match=said) as caught:
        inputs_of(prompt, None)
    assert caught.value.status == 501
