"""Pictures over HTTP, from OpenAI's client to real replicas over real sockets: what arrives, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import random
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError

from hub.api.generation.body import MAX_BODY_BYTES
from hub.api.routes import build_app
from stage_runtime.engines.base import create_engine
from tests.integration.hub.test_streaming_input import ONE
from tests.support.hub_fakes import deploy_of
from tests.support.local_replica import CountingEcho, LocalReplica
from tests.support.serving import HUBS, hub_of

TORCH = """
stages: [{{stage_id: 4, engine: torch, engine_args: {{target: "tests.support.callables:{name}"}}, final_output: text}}]
"""
#: Nothing in between looks into it.
FILE = random.Random(7).randbytes(MAX_BODY_BYTES * 3 // 4 - 1000)


@asynccontextmanager
async def served(document: str) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    """A client of a hub before one replica, and the replica's engine."""
    deploy = deploy_of(document)
    (stage,) = deploy.stages
    engine = CountingEcho(stage) if stage.engine == "echo" else create_engine(stage)
    engine.load(lambda _phase, _progress: None)
    with LocalReplica(HUBS, deploy=deploy, stage_id=stage.stage_id, engine=engine) as replica:
        async with hub_of(document, replica) as omni:
            transport = httpx.ASGITransport(app=build_app(omni, deploy, 0))
            async with httpx.AsyncClient(transport=transport, base_url="http://hub/v1") as client:
                yield client, engine


def messages_with(file: bytes, mime: str = "image/png") -> list[Any]:
    picture = {"url": f"data:{mime};base64,{base64.b64encode(file).decode()}", "detail": "auto"}
    parts = [{"type": "text", "text": "what is"}, {"type": "image_url", "image_url": picture}]
    return [{"role": "system", "content": "look"}, {"role": "user", "content": parts}]


def openai_of(client: httpx.AsyncClient) -> AsyncOpenAI:
    return AsyncOpenAI(base_url="http://hub/v1", api_key="none", http_client=client, max_retries=0)


async def test_the_largest_picture_arrives_byte_for_byte_whole_and_streamed() -> None:
    """The replica gets the messages as the client wrote them, and the answer tells which picture was seen."""
    async with served(ONE) as (client, engine):
        messages = messages_with(FILE)
        answer = await openai_of(client).chat.completions.create(model="", messages=messages)
        stream = await openai_of(client).chat.completions.create(model="", messages=messages, stream=True)
        streamed = "".join([event.choices[0].delta.content or "" async for event in stream])
    seen = f"what is <image/png;bytes={len(FILE)};crc32={zlib.crc32(FILE):08x}>"
    assert (answer.choices[0].message.content, streamed) == (seen, seen)
    assert [request.inputs for request in engine.requests] == [{"messages": messages}] * 2


async def test_a_callable_with_messages_gets_the_files() -> None:
    async with served(TORCH.format(name="look")) as (client, _):
        body = {"messages": [*messages_with(b"one", "image/webp"), *messages_with(FILE)[1:]]}
        answer = await client.post("/chat/completions", json=body)
    hashes = [hashlib.sha256(file).hexdigest() for file in (b"one", FILE)]
    assert answer.json()["choices"][0]["message"]["content"] == f"image/webp {hashes[0]} image/png {hashes[1]}"


async def test_a_stage_that_reads_text_only_says_so_by_its_number() -> None:
    async with served(TORCH.format(name="echo")) as (client, engine):
        with pytest.raises(BadRequestError, match=r"stage 4 .*takes no pictures"):
            await openai_of(client).chat.completions.create(model="", messages=messages_with(b"one"))
        assert not engine.has_unfinished()


@pytest.mark.attack("C12")
async def test_what_can_not_be_carried_is_refused_at_the_door() -> None:
    """One byte too much is a 413 that says what to do; a link is a 400 that says how to send the picture."""
    async with served(ONE) as (client, engine):
        large = await client.post("/chat/completions", json={"messages": messages_with(FILE + bytes(1000))})
        link = messages_with(b"")
        link[1]["content"][1]["image_url"]["url"] = "https://example.org/cat.png"
        linked = await client.post("/chat/completions", json={"messages": link})
        broken = messages_with(b"")
        broken[1]["content"][1]["image_url"]["url"] += "@@@"
        unreadable = await client.post("/chat/completions", json={"messages": broken})
        assert engine.requests == []
    assert (large.status_code, linked.status_code, unreadable.status_code) == (413, 400, 400)
    assert "smaller pictures" in large.json()["error"]["message"]
    said = linked.json()["error"]["message"]
    assert "messages[1].content[1]: " in said
    assert "nothing is fetched" in said
    assert "data:image/png;base64," in said
    assert "stage 0 " in unreadable.json()["error"]["message"]
