"""What vLLM-Omni's server offers and a hub can't do is refused before that server fetches or keeps anything."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hub.api.vllm.omni.unserved import refusal_of_body, refusal_of_path


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        ("POST", "/v1/videos", "makes videos"),
        ("GET", "/v1/videos/7/content", "makes videos"),
        ("GET", "/v1/realtime", "reads sound"),
        ("POST", "/v1/realtime/sessions", "reads sound"),
        ("GET", "/v1/duplex", "reads sound"),
        ("POST", "/v1/images/edits", "/v1/images/generations draws"),
        ("POST", "/v1/audio/voices", "this hub alone"),
        ("DELETE", "/v1/audio/voices/me", "this hub alone"),
        ("POST", "/v1/omni/sleep", "operators"),
        ("POST", "/start_profile", "operators"),
    ],
)
def test_a_route_that_needs_more_than_a_hub_has_says_what(method: str, path: str, said: str) -> None:
    assert said in refusal_of_path(method, path)


def test_what_is_served_passes() -> None:
    for path in ("/v1/chat/completions", "/v1/audio/speech", "/v1/images/generations", "/v1/models", "/metrics"):
        assert not refusal_of_path("POST", path)
    assert not refusal_of_path("GET", "/v1/audio/voices")
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "audio": {"format": "wav"}}
    schema = {"tools": [{"function": {"parameters": {"properties": {"image": {"type": "string"}}}}}], "image": None}
    for body in (chat, schema, {"input": "hello", "voice": "ethan"}, [1], "text"):
        assert not refusal_of_body(json.dumps(body).encode())
    assert not refusal_of_body(b"no JSON")


@pytest.mark.attack("C13")
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"input": "hi", "ref_audio": "http://169.254.169.254/latest"}, "ref_audio"),
        ({"input": "hi", "ref_audio": "file:///etc/passwd"}, "ref_audio"),
        ({"items": [{"input": "hi", "ref_audio": "http://10.0.0.1/"}]}, "ref_audio"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": [{"video_url": {"url": "http://a/"}}]}]}, "video_url"),
        ({"messages": [{"role": "user", "content": [{"type": "something"}]}]}, "something"),
        ({"type": "session.config", "ref_audio": "http://a/"}, "ref_audio"),
    ],
)
def test_no_address_or_file_of_a_request_is_opened(body: dict[str, Any], said: str) -> None:
    for written in (json.dumps(body).encode(), b"\xef\xbb\xbf" + json.dumps(body).encode()):
        assert refusal_of_body(written).startswith(f"{said}: no stage of this pipeline takes")
