"""What vLLM-Omni's server offers and a hub can't do is refused before that server fetches or keeps anything."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hub.api.vllm.omni.unserved import decoded, refusal_of_chat, refusal_of_path, refusal_of_request
from omni_discovery.errors import InvalidRequestError

BOTH = ("audio", "image")


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        ("POST", "/v1/videos", "makes videos"),
        ("GET", "/v1/videos/7/content", "makes videos"),
        ("GET", "/v1/realtime", "reads sound"),
        ("POST", "/v1/realtime/sessions", "reads sound"),
        ("GET", "/v1/duplex", "reads sound"),
        ("POST", "/v1/images/edits", "--api omni changes pictures"),
        ("POST", "/v1/audio/voices", "this hub alone"),
        ("DELETE", "/v1/audio/voices/me", "this hub alone"),
        ("POST", "/v1/omni/sleep", "operators"),
        ("POST", "/start_profile", "operators"),
        ("POST", "/generative_scoring", "scores texts"),
    ],
)
def test_a_route_that_needs_more_than_a_hub_has_says_what(method: str, path: str, said: str) -> None:
    assert said in refusal_of_path(method, path, BOTH)


def test_what_is_served_passes() -> None:
    for path in ("/v1/chat/completions", "/v1/audio/speech", "/v1/images/generations", "/v1/models", "/metrics"):
        assert not refusal_of_path("POST", path, BOTH)
    assert not refusal_of_path("GET", "/v1/audio/voices", BOTH)
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "audio": {"format": "wav"}}
    schema = {"tools": [{"function": {"parameters": {"properties": {"image": {"type": "string"}}}}}], "image": None}
    tools = {"messages": [{"content": [{"type": "tool_use", "input": {"image": "x"}}, {"type": "tool_result"}]}]}
    for body in (chat, schema, tools, {"input": "hello", "voice": "ethan"}, {"input": [[1, 2]]}, [1], "text"):
        assert not refusal_of_request(decoded(json.dumps(body).encode()))
    for nothing in (b"", b" ", b"--form"):
        assert not refusal_of_request(decoded(nothing))


def test_a_pipeline_that_makes_no_sound_or_no_pictures_says_so() -> None:
    assert "speaks" in refusal_of_path("POST", "/v1/audio/speech", ("image",))
    assert "speaks" in refusal_of_path("GET", "/v1/audio/speech/stream", ("text", None))
    assert "draws" in refusal_of_path("POST", "/v1/images/generations", (None, "audio"))
    assert "no tokenizer" in refusal_of_path("POST", "/v1/completions", ("image",), reads_tokens=False)
    assert not refusal_of_path("POST", "/v1/chat/completions", ("image",), reads_tokens=False)


@pytest.mark.attack("C13")
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"input": "hi", "ref_audio": "http://169.254.169.254/latest"}, "ref_audio"),
        ({"input": "hi", "ref_audio": "file:///etc/passwd"}, "ref_audio"),
        ({"items": [{"input": "hi", "ref_audio": "http://10.0.0.1/"}]}, "ref_audio"),
        ({"input": "hi", "ref_audio_2": "data:audio/wav;base64,AAAA"}, "ref_audio_2"),
        ({"input": "hi", "extra_params": {"emo_audio": "data:audio/wav;base64,AAAA"}}, "emo_audio"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": [{"video_url": {"url": "http://a/"}}]}]}, "video_url"),
        ({"messages": [{"role": "user", "content": [{"type": "something"}]}]}, "something"),
        ({"messages": [[{"role": "user", "content": [{"image_url": {"url": "http://a/"}}]}]]}, "image_url"),
        ({"messages": [{"content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]}, "image"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "http://a/"}]}]}, "input_file"),
        ({"input": [{"type": "function_call_output", "output": [{"type": "input_image"}]}]}, "input_image"),
        ({"type": "session.config", "ref_audio": "http://a/"}, "ref_audio"),
    ],
)
def test_no_address_or_file_of_a_request_is_opened(body: dict[str, Any], said: str) -> None:
    for written in (json.dumps(body).encode(), b"\xef\xbb\xbf" + json.dumps(body).encode()):
        assert refusal_of_request(decoded(written)).startswith(f"{said}: nothing here takes")


@pytest.mark.attack("Z86")
@pytest.mark.parametrize("odd", [b'"\xed\xa0\x80"', b'"\\ud800"', b"NaN", b"Infinity", b"1e999"])
def test_what_the_server_reads_and_nothing_else_does_is_refused(odd: bytes) -> None:
    """As if it brought nothing along, its files and links were passed on."""
    body = b'{"input": "hi", "ref_audio": "http://169.254.169.254/", "x": ' + odd + b"}"
    assert json.loads(body)["ref_audio"]
    with pytest.raises(InvalidRequestError):
        decoded(body)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"n": 2}, "n: one request makes one"),
        ({"response_format": {"type": "json_object"}}, "response_format: vLLM-Omni's server does not apply it"),
        ({"logprobs": True}, "logprobs: vLLM-Omni's server does not apply it"),
        ({"structured_outputs": {"choice": ["a"]}}, "--api vllm serves it"),
        ({"repetition_penalty": 1.1}, "give it in sampling_params_list"),
        ({"max_completion_tokens": 20}, "give max_tokens"),
    ],
)
def test_what_the_server_would_leave_out_of_a_chat_is_refused(asked: dict[str, Any], said: str) -> None:
    assert said in refusal_of_chat(asked)


def test_the_defaults_of_clients_are_no_reason_to_refuse_a_chat() -> None:
    usual = {"n": 1, "logprobs": False, "response_format": {"type": "text"}, "repetition_penalty": 1.0, "min_p": 0}
    assert not refusal_of_chat({**usual, "max_tokens": 20, "logit_bias": {}, "bad_words": [], "temperature": 0.5})
