"""The door of the HTTP API, before anything is asked of a replica."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message, Receive

from hub.api.audio.threads import EncoderThreads
from hub.api.chat.completions import ChatCompletions
from hub.api.chat.schema import parse_chat
from hub.api.generation.body import MAX_BODY_BYTES, MAX_DROPPED_BYTES
from hub.async_omni import AsyncOmni
from omni_discovery.deploy.document import parse_deploy
from omni_discovery.errors import InvalidRequestError, OverloadedError

DEPLOY = parse_deploy("stages: [{stage_id: 0, engine: echo, final_output: text}]", "one.yaml")

#: What OpenAI's clients and the programs around them send though nobody asked for anything.
NEUTRAL: list[tuple[str, Any]] = [
    ("logprobs", False),
    ("top_logprobs", 0),
    ("n", 1),
    ("logit_bias", {}),
    ("stop", None),
    ("tools", []),
    ("tool_choice", "none"),
    ("tool_choice", "auto"),
    ("parallel_tool_calls", True),
    ("functions", []),
    ("function_call", "auto"),
    ("response_format", {"type": "text"}),
    ("service_tier", "auto"),
    ("stream", None),
    ("repetition_penalty", 1),
    ("repetition_penalty", 1.0),
    ("min_p", 0),
    ("stop_token_ids", []),
    ("ignore_eos", False),
]

ASKED_FOR: list[tuple[str, Any]] = [
    ("logprobs", 0),
    ("top_logprobs", 3),
    ("n", 17),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tools", {}),
    ("tool_choice", "required"),
    ("response_format", {"type": "json_object"}),
    ("service_tier", "flex"),
    ("reasoning_effort", "low"),
    ("audio", {"voice": "alloy", "format": "midi"}),
    ("audio", {"format": "wav", "loudness": 3}),
    ("nonsense", None),
]


def body(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode()


@pytest.mark.parametrize(("name", "value"), NEUTRAL)
def test_a_value_that_asks_for_nothing_is_let_in_and_so_is_null(name: str, value: Any) -> None:
    plain = parse_chat(body()).text_params()
    assert parse_chat(body(**{name: value})).text_params() == plain
    assert parse_chat(body(**{name: None})).text_params() == plain


@pytest.mark.parametrize(("name", "value"), ASKED_FOR)
def test_what_would_have_to_be_ignored_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        parse_chat(body(**{name: value}))


JSON = (b"content-type", b"application/json")
POST = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [JSON]}


def pieces_of(content: bytes) -> Receive:
    """A client that sends it in two halves."""
    half = len(content) // 2
    pieces = [content[:half], content[half:], b""]

    async def receive() -> Message:
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    return receive


async def answer_to(pieces: list[bytes], **headers: str) -> tuple[int, dict[str, Any]]:
    """Status and body, and ``pieces`` without those that were read; there is no hub behind the door."""

    async def receive() -> Message:
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": piece != b""}

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [JSON, *((name.replace("_", "-").encode(), value.encode()) for name, value in headers.items())],
    }
    omni = AsyncOmni(DEPLOY, "hub-1", None)
    response = await ChatCompletions(omni, DEPLOY, EncoderThreads()).respond(Request(scope, receive))
    refused = omni.metrics.get_sample_value("omni_hub_requests_total", {"outcome": "BodyTooLongError"})
    assert refused == (response.status_code == 413)
    return response.status_code, json.loads(bytes(response.body))


HALF = b" " * (MAX_BODY_BYTES // 2)


@pytest.mark.parametrize(
    ("pieces", "headers"),
    [
        ([HALF] * 9 + [b""], {}),
        ([HALF] * 9 + [b""], {"content_length": str(9 * len(HALF))}),
        ([], {"content_length": str(MAX_BODY_BYTES + 1), "expect": "100-continue"}),
        ([], {"content_length": str(MAX_DROPPED_BYTES + 1)}),
        ([HALF] * (MAX_DROPPED_BYTES // len(HALF) + 1), {}),
    ],
    ids=["chunked", "announced", "asks first", "far too long", "without end"],
)
async def test_a_body_that_is_too_long_gets_413(pieces: list[bytes], headers: dict[str, str]) -> None:
    """It is read to its end where its sender would hear nothing else, and not at all where he waits or it is huge."""
    left = list(pieces)
    status, answer = await answer_to(left, **headers)
    error = answer["error"]
    assert (status, error["type"], error["code"]) == (413, "invalid_request_error", "request_too_large")
    assert str(MAX_BODY_BYTES) in error["message"]
    assert "send less in one request, or smaller pictures" in error["message"]
    assert left == []


async def test_another_model_is_refused_as_not_found_and_counted_by_a_public_name() -> None:
    omni = AsyncOmni(DEPLOY, "hub-1", None)
    response = await ChatCompletions(omni, DEPLOY, EncoderThreads()).respond(
        Request(POST, pieces_of(body(model="gpt")))
    )
    error = json.loads(bytes(response.body))["error"]
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "'gpt' is not served here" in error["message"]
    assert omni.metrics.get_sample_value("omni_hub_requests_total", {"outcome": "ModelNotFoundError"}) == 1


async def test_the_time_in_the_hub_begins_when_the_body_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that sends slowly, by this clock a quarter of a minute for each piece, takes none of the hub's time."""
    now_s = 100.0
    begun: list[float] = []

    async def receive() -> Message:
        nonlocal now_s
        now_s += 15.0
        return await piece()

    def generate(*_: Any, received_s: float, **__: Any) -> None:
        begun.append(received_s)
        raise OverloadedError("full")

    omni, piece = AsyncOmni(DEPLOY, "hub-1", None), pieces_of(body())
    monkeypatch.setattr(omni, "generate", generate)
    monkeypatch.setattr("hub.api.generation.running.time.perf_counter", lambda: now_s)
    response = await ChatCompletions(omni, DEPLOY, EncoderThreads()).respond(Request(POST, receive))
    assert (response.status_code, begun) == (429, [now_s])
    assert now_s > 120.0
