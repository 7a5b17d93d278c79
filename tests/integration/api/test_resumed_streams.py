"""A second hub goes on with an answer that another began, over the same replicas, for OpenAI's client."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import openai
import pytest

from hub.api.door.guard import Door, Locks
from hub.api.door.keys import KeyRing, read_key
from hub.api.routes import build_app
from hub.api.server import HttpServer
from hub.async_omni import AsyncOmni
from omni_discovery.curve import KeyPair
from omni_discovery.deploy.document import DeployConfig
from omni_discovery.sockets.listen import bind
from stage_runtime.engines.base import create_engine
from tests.support.hub_fakes import deploy_of, started_hub, until
from tests.support.local_replica import LocalReplica
from tests.support.serving import CONFIG
from tests.support.speaking import SPEAKER

ECHO = "stages: [{stage_id: 0, engine: echo, final_output: text}]"
WORDS = " ".join(f"w{number}" for number in range(40))
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": WORDS}], "stream": True}
NEW = {"x-omni-resume": "new"}
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KEYS = {"ann": "ann-key-0123456789abcdef", "bob": "bob-key-0123456789abcdef"}


@dataclass
class Pair:
    """Two hubs before the same replicas."""

    urls: tuple[str, str]
    hubs: tuple[AsyncOmni, AsyncOmni]
    replicas: list[LocalReplica]

    def client(self, number: int, key: str = "ann") -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.urls[number], timeout=60.0, headers={"Authorization": f"Bearer {KEYS[key]}"}
        )


@asynccontextmanager
async def pair_of(text: str, *, deterministic: bool = True, **engine_args: Any) -> AsyncIterator[Pair]:
    """``engine_args`` are those of echo stages."""
    deploy, keys = deploy_of(text), (KeyPair.generate(), KeyPair.generate())
    allowed = {pair.public: f"hub-{number}" for number, pair in enumerate(keys)}
    ring = KeyRing([read_key(name, key, "here") for name, key in KEYS.items()])
    urls, hubs = [], []
    async with AsyncExitStack() as stack:
        replicas = [
            stack.enter_context(replica_of(deploy, stage.stage_id, allowed, engine_args)) for stage in deploy.stages
        ]
        infos = [replace(each.info, deterministic=deterministic) for each in replicas]
        for number, pair in enumerate(keys):
            omni = AsyncOmni(deploy, f"hub-{number}", pair, CONFIG, "round-robin")
            hubs.append(await stack.enter_async_context(started_hub(omni, *infos, timeout_s=20.0)))
            app = Door(build_app(omni, deploy, 0), Locks(api=ring), lambda _name: None, lambda _error: None)
            listeners, server = bind("127.0.0.1", 0), HttpServer(omni, app)
            server.start(listeners)
            stack.push_async_callback(server.stop)
            urls.append(f"http://127.0.0.1:{listeners[0].getsockname()[1]}")
        yield Pair((urls[0], urls[1]), (hubs[0], hubs[1]), replicas)


def replica_of(
    deploy: DeployConfig, stage_id: int, allowed: dict[str, str], engine_args: dict[str, Any]
) -> LocalReplica:
    stage = deploy.stage(stage_id)
    about: dict[str, Any] = {"stage_id": stage_id, "epoch": 70 + stage_id, "deploy": deploy}
    if stage.engine == "echo":
        return LocalReplica(allowed, **about, **engine_args)
    engine = create_engine(stage)
    engine.load(lambda _phase, _progress: None)
    return LocalReplica(allowed, **about, engine=engine)


async def read(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], place: str = "new", most: int | None = None
) -> list[dict[str, Any]]:
    """The chunks of a stream; with ``most`` only so many, and then the connection is cut."""
    chunks: list[dict[str, Any]] = []
    async with client.stream("POST", path, json=body, headers={"x-omni-resume": place}) as answer:
        if answer.status_code != 200:
            return [{"status": answer.status_code, **json.loads(await answer.aread())}]
        assert answer.headers["x-omni-resume"] == place.partition(".")[0] or place == "new"
        async for line in answer.aiter_lines():
            if line == "data: [DONE]" or len(chunks) == most:
                return chunks
            if line:
                chunks.append(json.loads(line.removeprefix("data: ")))
    raise AssertionError("the stream has no end")


async def in_two(pair: Pair, path: str, body: dict[str, Any], most: int) -> tuple[list[Any], list[Any]]:
    """The chunks of an answer that one hub begins and the other goes on with, and those of a whole one.

    The whole one is made by the second hub, of the same token.
    """
    async with pair.client(0) as first, pair.client(1) as second:
        chunks = await read(first, path, body, most=most)
        place = chunks[-1]["resume"]
        whole = await read(second, path, body, place.partition(".")[0])
        rest = await read(second, path, body, place)
    return chunks + rest, whole


def text_in(chunks: list[Any]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(each.get("text") or each.get("delta", {}).get("content") or "" for each in choices)


@pytest.mark.parametrize("most", [1, 7, 39])
@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
async def test_the_answer_of_two_hubs_is_the_one_of_one(path: str, most: int) -> None:
    """Each word has a drawn number, from the seed that is in the token, and no word comes twice."""
    body: dict[str, Any] = {"prompt": WORDS, "stream": True} if path == COMPLETIONS else CHAT
    body = {**body, "stream_options": {"include_usage": True}}
    async with pair_of(ECHO, random=True, delay_s=0.01) as pair:
        told, whole = await in_two(pair, path, body, most)
        assert text_in(told) == text_in(whole)
        assert text_in(whole).count("w") == text_in(whole).count("~") == 40
        ends = [choice["finish_reason"] for chunk in told for choice in chunk["choices"] if choice["finish_reason"]]
        assert ends == ["stop"]
        assert sum("role" in choice.get("delta", {}) for chunk in told for choice in chunk["choices"]) == (
            path == CHATS
        )
        assert [chunk["usage"] for chunk in told if chunk.get("usage")] == [whole[-1]["usage"]]
        assert told[-1]["resume"] == whole[-1]["resume"]
        async with pair.client(1) as client:
            # All had come but the end: only what is not of the answer comes again.
            (last,) = await read(client, path, body, told[-1]["resume"])
            assert last["usage"] == whole[-1]["usage"]
            metrics = (await client.get("/metrics")).text
        assert "omni_hub_requests_resumed_total 2.0" in metrics


async def test_each_of_several_answers_goes_on_where_it_was() -> None:
    """Each has drawn from a seed of its own."""
    async with pair_of(ECHO, random=True, delay_s=0.01, capacity=4) as pair:
        told, whole = await in_two(pair, CHATS, {**CHAT, "n": 3}, 20)
        for number in range(3):
            of_one = [
                text_in(
                    [{"choices": [each for each in chunk["choices"] if each["index"] == number]} for chunk in chunks]
                )
                for chunks in (told, whole)
            ]
            assert of_one[0] == of_one[1]
            assert of_one[0].count("w") == 40


@pytest.mark.parametrize("name", ["wav", "pcm16", "flac", "mp3", "aac"])
async def test_sound_goes_on_where_it_was(name: str) -> None:
    async with pair_of(SPEAKER) as pair:
        body = {**CHAT, "messages": [{"role": "user", "content": "one two three four"}]}
        body |= {"modalities": ["text", "audio"], "audio": {"voice": "default", "format": name}}
        told, whole = await in_two(pair, CHATS, body, 5)
        assert text_in(told) == text_in(whole)
        sounds = []
        for chunks in (told, whole):
            heard = [choice["delta"].get("audio", {}) for chunk in chunks for choice in chunk["choices"]]
            sounds.append(b"".join(base64.b64decode(each.get("data", "")) for each in heard))
            assert [bool(each.get("expires_at")) for each in heard].count(True) == 1
        assert sounds[0] == sounds[1] != b""


async def test_ogg_files_are_numbered_at_random_and_not_resumed() -> None:
    """Opus comes in Ogg. Nobody gets a token with it that would be of no use."""
    body = {**CHAT, "modalities": ["audio"], "audio": {"voice": "default", "format": "opus"}}
    async with pair_of(SPEAKER) as pair, pair.client(0) as client:
        (refused,) = await read(client, CHATS, body)
    assert refused["status"] == 400
    assert "or opus, is resumed: leave the header out" in refused["error"]["message"]


async def test_an_answer_that_comes_out_otherwise_is_not_joined() -> None:
    """These stages do not say that they repeat themselves, so that they were given no seed: 409, and nothing of it."""
    async with pair_of(ECHO, deterministic=False, random=True, delay_s=0.01) as pair:
        async with pair.client(0) as first, pair.client(1) as second:
            begun = await read(first, CHATS, CHAT, most=5)
            (refused,) = await read(second, CHATS, CHAT, begun[-1]["resume"])
        assert (refused["status"], refused["error"]["code"]) == (409, "resume_differs")
        await until(lambda: all(hub.in_flight == 0 for hub in pair.hubs))


@pytest.mark.attack("O11")
async def test_a_token_is_of_one_key_and_one_body() -> None:
    """1. another key, another body, another route: 409, and no stage works for it
    2. a token that was guessed: 409; what is none: 400
    """
    async with pair_of(ECHO, random=True) as pair:
        async with pair.client(0) as first, pair.client(1) as second, pair.client(1, "bob") as stranger:
            place = (await read(first, CHATS, CHAT, most=5))[-1]["resume"]
            await until(lambda: pair.hubs[0].in_flight == 0)
            begun = len(pair.replicas[0].engine.begun)
            other = {"prompt": WORDS, "stream": True}
            for client, path, body, shown in (
                (stranger, CHATS, CHAT, place),
                (stranger, CHATS, CHAT, place.partition(".")[0]),
                (second, CHATS, {**CHAT, "temperature": 0}, place),
                (second, COMPLETIONS, other, place),
                (second, CHATS, CHAT, "A" * 43),
            ):
                (refused,) = await read(client, path, body, shown)
                assert (refused["status"], refused["error"]["code"]) == (409, "resume_mismatch")
            (refused,) = await read(second, CHATS, CHAT, "nonsense")
            assert refused["status"] == 400
        assert len(pair.replicas[0].engine.begun) == begun


@pytest.mark.parametrize(
    "body",
    [{"stream": False}, {"logprobs": True}],
    ids=["whole", "log probabilities"],
)
async def test_what_can_not_be_resumed_says_so(body: dict[str, Any]) -> None:
    async with pair_of(ECHO) as pair, pair.client(0) as client:
        answer = await client.post(CHATS, json={**CHAT, **body}, headers=NEW)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
        answer = await client.post(CHATS, json=CHAT, headers=[("x-omni-resume", "new")] * 2)
        assert answer.status_code == 400


async def test_a_form_is_drawn_anew_and_never_resumed() -> None:
    """Its boundary differs each time, so that a key of the client's would be refused as that of another request."""
    picture = b"\x89PNG\r\n\x1a\n" + bytes(20)
    pair_that_draws = "stages: [{stage_id: 0, engine: echo, engine_args: {modality: image}, final_output: image}]"
    async with pair_of(pair_that_draws, modality="image") as pair, pair.client(0) as client:
        for headers, status in (({"Idempotency-Key": "a"}, 200), ({"Idempotency-Key": "a"}, 200), (NEW, 400)):
            form = {"image": ("cat.png", picture, "image/png")}
            answer = await client.post("/v1/images/edits", files=form, data={"prompt": "x"}, headers=headers)
            assert answer.status_code == status, answer.text


async def test_a_clients_own_key_makes_the_same_answer_at_any_hub() -> None:
    """1. whole, at one hub and at the other; 2. a stream that one began goes on at the other, by the same key"""
    named = {"Idempotency-Key": "order-7"}
    async with pair_of(ECHO, random=True, delay_s=0.005) as pair, pair.client(0) as first, pair.client(1) as second:
        whole = {**CHAT, "stream": False}
        answers = [await client.post(CHATS, json=whole, headers=named) for client in (first, second)]
        said = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
        assert said[0] == said[1]
        assert said[0].count("~") == 40
        unnamed = await second.post(CHATS, json=whole)
        assert unnamed.json()["choices"][0]["message"]["content"] != said[0]
        for client in (first, second):
            client.headers["Idempotency-Key"] = "order-8"
        begun = await read(first, CHATS, CHAT, most=5)
        again = await read(second, CHATS, CHAT, begun[-1]["resume"])
        assert text_in(begun + again).count("w") == 40


async def test_one_hub_answers_a_key_once_at_a_time() -> None:
    """1. the same request under way: 409, come again; another body: 409; another client's key: served
    2. OpenAI's client comes again by itself and gets the answer; 3. a key whose request was refused is free
    """
    named = {"Idempotency-Key": "order-7"}
    whole: dict[str, Any] = {**CHAT, "stream": False}
    async with pair_of(ECHO, delay_s=0.03, capacity=4) as pair, pair.client(0) as client, pair.client(0, "bob") as bob:
        asked = asyncio.create_task(client.post(CHATS, json=whole, headers=named))
        await until(lambda: pair.hubs[0].in_flight == 1)
        again = await client.post(CHATS, json=whole, headers=named)
        assert (again.status_code, again.json()["error"]["code"]) == (409, "idempotency_key_in_use")
        assert again.headers["retry-after"] == "1"
        other = await client.post(CHATS, json={**whole, "temperature": 0}, headers=named)
        assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")
        assert other.headers["x-should-retry"] == "false"
        assert (await bob.post(CHATS, json=whole, headers=named)).status_code == 200
        assert (await asked).status_code == 200
        async with openai.AsyncOpenAI(base_url=f"{pair.urls[0]}/v1", api_key=KEYS["ann"]) as official:
            calls = (
                official.chat.completions.create(**whole, model="", extra_headers={"Idempotency-Key": "order-8"})
                for _ in range(2)
            )
            answers = await asyncio.gather(*calls)
            assert [each.choices[0].message.content for each in answers] == [WORDS] * 2
        ill = {"Idempotency-Key": "order-9"}
        assert (await client.post(CHATS, json={**whole, "model": "none"}, headers=ill)).status_code == 404
        assert (await client.post(CHATS, json={**whole, "n": 17}, headers=ill)).status_code == 400
        assert (await client.post(CHATS, json=whole, headers=ill)).status_code == 200
        assert (await client.post(CHATS, json=whole, headers={"Idempotency-Key": "x" * 129})).status_code == 400
