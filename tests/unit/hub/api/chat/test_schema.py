"""The door of POST /v1/chat/completions: what is let in, and what a refusal says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hub.api.chat.schema import chat_params, parse_chat
from omni_discovery.deploy.document import parse_deploy
from omni_discovery.errors import InvalidRequestError

PAIR = parse_deploy(
    """
stages:
  - {stage_id: 3, engine: echo, final_output: text}
  - {stage_id: 5, engine: echo, final_output: image}
""",
    "pair.yaml",
)


def body(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def test_text_parts_are_read_like_a_string() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse_chat(body(messages=[{"role": "user", "content": parts}])).messages[0]["content"] == parts


def test_the_sound_of_videos_is_heard_where_that_is_asked_for() -> None:
    """As vLLM names it, and nothing else of it: its processors are the operator's."""
    asked = parse_chat(body(mm_processor_kwargs={"use_audio_in_video": True}))
    assert asked.inputs() == {"messages": asked.messages, "mm_processor_kwargs": {"use_audio_in_video": True}}
    for neutral in (None, {}, {"use_audio_in_video": False}):
        assert parse_chat(body(mm_processor_kwargs=neutral)).inputs() == {"messages": asked.messages}
    for wrong in ({"size": 5}, {"use_audio_in_video": "yes"}, 7):
        with pytest.raises(InvalidRequestError, match="mm_processor_kwargs"):
            parse_chat(body(mm_processor_kwargs=wrong))


def test_text_sampling_goes_to_text_stages_and_the_seed_to_all() -> None:
    chat = parse_chat(body(temperature=0.5, max_completion_tokens=7, max_tokens=9, seed=4))
    assert chat_params(PAIR, chat) == {3: {"temperature": 0.5, "max_tokens": 7, "seed": 4}, 5: {"seed": 4}}


def test_the_explicit_list_wins_stage_by_stage() -> None:
    chat = parse_chat(body(temperature=0.5, seed=4, sampling_params_list=[{"temperature": 1.0}, {"steps": 3}]))
    assert chat_params(PAIR, chat) == {3: {"temperature": 1.0, "seed": 4}, 5: {"steps": 3, "seed": 4}}


@pytest.mark.attack("C15", "C18", "D5")
@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"messages": [{"content": ' + b"[" * 40_000, "not JSON"),
        (b'{"messages": [{"role": "user", "content": "w", "z": [' + b"[[]]," * 50_000 + b"1]}]}", "50000 lists"),
        (b"[]", "object"),
        (b"{}", "messages"),
        (body(messages=[]), "empty"),
        (body(messages=["x"]), "messages"),
        (body(messages=[{"role": "user"}]), "messages[0].content"),
        (body(messages=[{"role": [], "content": "x"}]), "messages[0].role"),
        (body(messages=[{"role": {}, "content": "x"}]), "messages[0].role"),
        (body(messages=[{"role": "user", "content": "\n\t "}]), "empty"),
        (body(messages=[{"role": "user", "content": [{"type": "video_url"}]}]), "video_url: give the video itself"),
        (body(temperature=9), "$.temperature"),
        (body(max_tokens=0), "$.max_tokens"),
        (body(modalities=[]), "$.modalities"),
        (body(seed=-1), "$.seed"),
        (body(tools=[{}]), "tools"),
    ],
)
def test_a_wrong_body_is_refused_by_name(raw: bytes, said: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        parse_chat(raw)
    assert said in str(error.value)


def test_the_explicit_list_may_end_early_and_leave_stages_out() -> None:
    assert chat_params(PAIR, parse_chat(body(sampling_params_list=[{"seed": 1}]))) == {3: {"seed": 1}, 5: {}}
    assert chat_params(PAIR, parse_chat(body(sampling_params_list=[None, {"seed": 1}]))) == {3: {}, 5: {"seed": 1}}


def test_more_parameters_than_stages_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="2 stages"):
        chat_params(PAIR, parse_chat(body(sampling_params_list=[{}, {}, {}])))


@pytest.mark.attack("C12")
def test_a_client_names_an_adapter_and_does_not_say_where_it_is() -> None:
    assert chat_params(PAIR, parse_chat(body(sampling_params_list=[{"lora": "sql"}])))[3]["lora"] == "sql"
    for lora in ({"name": "sql", "path": "/etc"}, ["sql"], 1):
        with pytest.raises(InvalidRequestError, match="'lora' is the name of an adapter"):
            chat_params(PAIR, parse_chat(body(sampling_params_list=[{}, {"lora": lora}])))


def test_logprobs_of_a_vllm_stage_have_no_place_in_the_answer() -> None:
    """Another engine may mean something else by them."""
    pair = parse_deploy("stages: [{stage_id: 0, engine: vllm, final_output: text}, {stage_id: 1, engine: own}]", "pair")
    with pytest.raises(InvalidRequestError, match="--api vllm"):
        chat_params(pair, parse_chat(body(sampling_params_list=[{"logprobs": 0}])))
    assert chat_params(pair, parse_chat(body(sampling_params_list=[{}, {"logprobs": 0}])))[1] == {"logprobs": 0}
