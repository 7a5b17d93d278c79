"""What bodies with thousands of wrong elements, in any field of any model, cost a hub with vLLM's server."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from types import NoneType
from typing import Any, Final, Literal, get_args, get_origin

import httpx
import msgspec
import pytest

from omni_discovery.deploy.document import DeployConfig
from tests.support.engines import THINKER, as_the_supervisor_has_it, skip_without_vllms_server
from tests.support.local_replica import LocalReplica
from tests.support.serving import HUBS, hub_of

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

#: Wrong elements of one field.
MANY: Final = 2000
#: Processor time for one body; before, 500 empty items of a conversation took a second, and 220 MB of text.
MOST_S: Final = 1.5
MOST_ANSWER_BYTES: Final = 16_000
#: What a body has beside the field with the wrong elements, so that a model looks at that.
RIGHT: Final[Mapping[str, Any]] = {"model": "m", "prompt": "a", "max_tokens": 1, "input": "a"}
RIGHT_MESSAGES: Final = [{"role": "user", "content": "a"}]
LISTS_IN_MESSAGES: Final = ("content", "tool_calls", "tools", "summary", "output", "custom", "")


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Any, httpx.AsyncClient, httpx.AsyncClient]]:
    """VLLM's application before a hub, its clients with the hub's own bounds, and without."""
    skip_without_vllms_server()
    from hub.api.vllm.server import VllmFrontend

    stage = msgspec.structs.replace(THINKER, final_output="text", default_sampling_params={"max_tokens": 1})
    with as_the_supervisor_has_it():
        frontend = VllmFrontend(DeployConfig(stages=(stage,), model="m"), "")
    document = "stages: [{stage_id: 0, engine: vllm, model: m, final_output: text}]"
    with LocalReplica(HUBS) as replica:
        async with hub_of(document, replica) as omni:
            bounded: Any = await frontend.build(omni)
            clients = [
                httpx.AsyncClient(
                    transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://hub", timeout=60
                )
                for app in (bounded, bounded._app)
            ]
            async with clients[0], clients[1]:
                yield bounded._app, clients[0], clients[1]


def models_of(app: Any) -> Iterator[tuple[str, type[Any]]]:
    """The models of the bodies that routes take, each once, with the path of one of its routes."""
    from fastapi.routing import APIRoute
    from pydantic import BaseModel

    seen: set[Any] = set()
    for route in app.routes:
        for field in route.dependant.body_params if isinstance(route, APIRoute) else ():
            waiting = [field.field_info.annotation]
            while waiting:
                kind = waiting.pop()
                waiting += get_args(kind)
                if isinstance(kind, type) and issubclass(kind, BaseModel) and kind not in seen:
                    seen.add(kind)
                    yield route.path, kind


def is_plain(kind: Any) -> bool:
    """Whether a field holds one value, which is neither a list nor an object."""
    if get_origin(kind) is Literal:
        return True
    parts = [each for each in get_args(kind) if isinstance(each, type) or get_origin(each) is not None]
    return all(map(is_plain, parts)) if parts else kind in (bool, int, float, str, NoneType)


def wrong_bodies(model: type[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Bodies with thousands of wrong elements in each field of a model, and in lists of its messages."""
    right = {name: value for name, value in RIGHT.items() if name in model.model_fields}
    if "messages" in model.model_fields:
        right["messages"] = RIGHT_MESSAGES
    for name, field in model.model_fields.items():
        if is_plain(field.annotation):
            continue
        yield f"{name}: objects", {**right, name: [{}] * MANY}
        yield f"{name}: lists", {**right, name: [[]] * MANY}
        yield f"{name}: pairs", {**right, name: {f"k{each}": {} for each in range(MANY)}}
        yield f"{name}: numbers, then a text", {**right, name: [1] * (20 * MANY) + ["a"]}
    for name in {"messages", "input"} & model.model_fields.keys():
        for inner in LISTS_IN_MESSAGES:
            yield f"{name}: {inner}", {**right, name: [{"role": "user", "content": "a", inner: [{}] * MANY}]}


@pytest.mark.attack("P20")
async def test_no_field_of_any_model_of_vllms_server_takes_long_or_answers_at_length_over_wrong_elements() -> None:
    """The hub's own bounds are left out: what is asked here is what the server makes of it by itself."""
    taken: dict[str, tuple[float, int]] = {}
    seen: set[str] = set()
    async with served() as (app, _, plain):
        for path, model in models_of(app):
            seen.add(path)
            for field, body in wrong_bodies(model):
                began_s = time.process_time()
                answer = await plain.post(path, json=body)
                taken[f"{path} {model.__name__} {field}"] = (time.process_time() - began_s, len(answer.content))
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize"} <= seen
    assert [each for each, (seconds, _) in taken.items() if seconds > MOST_S] == []
    assert [each for each, (_, size_bytes) in taken.items() if size_bytes > MOST_ANSWER_BYTES] == []


@pytest.mark.attack("P20")
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions", "/invocations"])
async def test_more_objects_than_a_conversation_may_have_are_refused_and_right_ones_answered(path: str) -> None:
    name = "input" if path == "/v1/responses" else "messages"
    async with served() as (_, client, _):
        large = await client.post(path, json={"model": "m", name: RIGHT_MESSAGES * 5000})
        wrong = await client.post(path, json={"model": "m", name: [{"role": "user", "content": 7}]})
        right = await client.post(path, json={"model": "m", name: RIGHT_MESSAGES})
    assert (large.status_code, wrong.status_code, right.status_code) == (400, 400, 200)
    assert "more than 4096 objects beside its tools and forms" in large.json()["error"]["message"]
    assert "content" in wrong.json()["error"]["message"] or path == "/invocations"


@pytest.mark.attack("P23")
@pytest.mark.parametrize(
    "body", [b'\xef\xbb\xbf{"model": "m", "prompt": "a"}', '{"model": "m"}'.encode("utf-16"), b"[]", b'"a"', b"7"]
)
async def test_what_is_no_plain_object_of_json_is_refused(body: bytes) -> None:
    async with served() as (_, client, _):
        for path in ("/v1/completions", "/scale_elastic_ep"):
            answer = await client.post(path, content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == 400, path
            assert "JSON" in answer.json()["error"]["message"]


@pytest.mark.attack("Q3")
@pytest.mark.parametrize(("depth", "said"), [(1000, "nested too deep"), (100_000, "50000 lists and objects")])
async def test_arguments_of_a_call_that_are_nested_too_deep_are_the_clients_mistake(depth: int, said: str) -> None:
    """The server reads that text as JSON; it ended in a 500, with a stack in the log."""
    nested = '{"a":' + "[" * depth + "]" * depth + "}"
    call = {"id": "a", "type": "function", "function": {"name": "a", "arguments": nested}}
    chat = {"model": "m", "max_tokens": 1, "messages": [*RIGHT_MESSAGES, {"role": "assistant", "tool_calls": [call]}]}
    function_call = {"type": "function_call", "call_id": "a", "name": "a", "arguments": nested}
    response = {"model": "m", "max_output_tokens": 1, "input": [function_call, {"role": "user", "content": "a"}]}
    async with served() as (_, client, _):
        for path, body in (("/v1/chat/completions", chat), ("/v1/responses", response)):
            answer = await client.post(path, json=body)
            assert (answer.status_code, said in answer.text) == (400, True), answer.text[:300]


@pytest.mark.attack("Q4")
async def test_a_text_that_no_context_holds_is_not_made_tokens() -> None:
    """Six megabytes were made tokens, for seconds, where the model can hold some hundred of them."""
    long = "a " * 3_000_000
    messages = [{"role": "user", "content": long}]
    async with served() as (_, client, _):
        answer = await client.post("/tokenize", json={"model": "m", "prompt": "a b", "return_token_strs": True})
        assert (answer.status_code, len(answer.json()["token_strs"])) == (200, answer.json()["count"])
        for body in ({"prompt": long}, {"prompt": long, "return_token_strs": True}, {"messages": messages}):
            answer = await client.post("/tokenize", json={"model": "m", **body})
            assert (answer.status_code, "can't fit into the model's context" in answer.text) == (400, True)
        # What is to be cut to a few tokens is cut to some characters before.
        for path, asked in (("/v1/completions", {"prompt": long}), ("/v1/chat/completions", {"messages": messages})):
            begin_s = time.process_time()
            cut = await client.post(path, json={"model": "m", "max_tokens": 1, "truncate_prompt_tokens": 5, **asked})
            assert time.process_time() - begin_s < MOST_S, path
            assert (cut.status_code, cut.json()["usage"]["prompt_tokens"]) == (200, 5)
