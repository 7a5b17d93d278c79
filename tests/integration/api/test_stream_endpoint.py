"""/v1/stream from a WebSocket client's side: frames in, frames out, and every way in which it can end."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from hub.api.door.guard import Door, Locks
from hub.api.door.keys import KeyRing
from hub.api.routes import build_app
from hub.api.server import HttpServer
from hub.config import HubConfig
from omni_discovery.records.api_key import digest_of
from omni_discovery.sockets.listen import bind
from tests.integration.hub.test_streaming_input import ONE, TALK
from tests.support.hub_fakes import deploy_of, until
from tests.support.local_replica import LocalReplica
from tests.support.quiet import soon_s
from tests.support.serving import CONFIG, HUBS, hub_of


@pytest.fixture
def replica() -> Iterator[LocalReplica]:
    with LocalReplica(HUBS, capacity=2, delay_s=0.01) as running:
        yield running


@asynccontextmanager
async def served(document: str, *replicas: LocalReplica, config: HubConfig = CONFIG) -> AsyncIterator[str]:
    """The address of the endpoint."""
    async with hub_of(document, *replicas, config=config) as omni:
        listeners = bind("127.0.0.1", 0)
        listeners[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        server = HttpServer(omni, build_app(omni, deploy_of(document), 0))
        server.start(listeners)
        try:
            yield f"ws://127.0.0.1:{listeners[0].getsockname()[1]}/v1/stream"
        finally:
            await server.stop()


async def say(client: ClientConnection, **fields: Any) -> None:
    await client.send(json.dumps({"type": "segment", **fields}))


async def hear(client: ClientConnection, *until_types: str) -> list[dict[str, Any]]:
    """All frames up to and with the first of these types."""
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(10.0):
        while not found or found[-1]["type"] not in until_types:
            found.append(json.loads(await client.recv()))
    return found


def text(frames: list[dict[str, Any]]) -> str:
    return "".join(frame.get("text", "") for frame in frames)


async def test_each_segment_is_answered_before_the_next_is_sent(replica: LocalReplica) -> None:
    async with served(ONE, replica) as address, connect(address) as client:
        for number, prompt in enumerate(("to be", "or not", "to be")):
            await say(client, prompt=prompt, last=number == 2)
            frames = await hear(client, "segment_end")
            assert text(frames) == prompt
            assert {frame["segment"] for frame in frames} == {number}
            assert frames[-1]["finish_reason"] == "stop"
            assert frames[-1]["usage"]["completion_tokens"] == 2
        end, done = await hear(client, "done")
        assert (end["type"], end["finish_reason"], end["usage"]["completion_tokens"]) == ("stage_end", "stop", 6)
        assert done["timings_s"]["total"] > 0
        with pytest.raises(ConnectionClosed):
            await client.recv()
        assert client.close_code == 1000
        assert len(replica.engine.begun) == 3


async def test_pictures_come_as_they_are_and_an_end_frame_ends_the_input() -> None:
    document = deploy_of(TALK)
    with (
        LocalReplica(HUBS, deploy=document) as first,
        LocalReplica(HUBS, stage_id=1, deploy=document, modality="image") as second,
    ):
        async with served(TALK, first, second) as address, connect(address) as client:
            for prompt in ("a", "b"):
                await say(client, prompt=prompt)
            await client.send('{"type": "end"}')
            frames = await hear(client, "done")
        images = [frame for frame in frames if frame.get("data")]
        assert [frame["segment"] for frame in images] == [0, 1]
        assert all(base64.b64decode(frame["data"]).startswith(b"\x89PNG") for frame in images)
        assert sum(frame["type"] == "segment_end" for frame in frames) == 4


@pytest.mark.attack("C17", "I8")
@pytest.mark.parametrize(
    ("frame", "why"),
    [
        ("no json", "not JSON"),
        ('{"type": "segment", "messages": ' + "[" * 40_000, "can't be used|not JSON"),
        ('{"type": "segment", "messages": ' + "[" * 100_000, "more than 50000 lists and objects"),
        ('{"type": "song"}', "song"),
        ('{"type": "segment"}', "one of 'prompt'"),
        ('{"type": "segment", "prompt": "a", "messages": []}', "one of 'prompt'"),
        ('{"type": "segment", "prompt": 5}', "prompt"),
        ('{"type": "segment", "prompt": "a", "colour": 1}', "colour"),
        ('{"type": "segment", "prompt": "a", "modalities": ["smell"]}', "smell|first segment"),
        ('{"type": "segment", "prompt": " "}', "empty"),
        ('{"type": "segment", "messages": []}', "'messages' is empty"),
        ('{"type": "segment", "messages": [{"role": 5, "content": "hi"}]}', "messages[0].role must be"),
        ('{"type": "segment", "messages": [{"role": "user", "content": 5}]}', "messages[0].content must be"),
        ('{"type": "segment", "messages": [{"role": "user", "content": " "}]}', "the last message is empty"),
        (
            '{"type": "segment", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "POST /v1/chat/completions",
        ),
        (
            '{"type": "segment", "prompt": "a", "sampling_params_list": [{"lora": {"name": "a", "path": "/"}}]}',
            "name of an adapter|first segment",
        ),
        (b"\x00\xff", "binary"),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
async def test_a_bad_frame_gets_a_clear_error_and_costs_this_request_only(
    replica: LocalReplica, frame: str | bytes, why: str, is_first: bool
) -> None:
    async with served(ONE, replica) as address, connect(address) as client, connect(address) as other:
        await say(other, prompt="to be")
        await hear(other, "segment_end")
        if not is_first:
            await say(client, prompt="one")
            await hear(client, "segment_end")
        await client.send(frame)
        error = (await hear(client, "error"))[-1]
        assert (error["status"], error["error"]["code"]) == (400, "invalid_request")
        assert any(each in error["error"]["message"] for each in why.split("|")), error
        with pytest.raises(ConnectionClosed):
            await client.recv()
        assert client.close_code == 1008
        await say(other, prompt="or not", last=True)
        assert text(await hear(other, "done")) == "or not"
        await until(lambda: len(replica.loop) == 0)


@pytest.mark.attack("C17")
async def test_a_frame_that_is_too_long_closes_the_connection_and_ends_its_request(replica: LocalReplica) -> None:
    async with served(ONE, replica) as address, connect(address) as client:
        await say(client, prompt="one")
        await hear(client, "segment_end")
        await say(client, prompt="x" * (3 << 20))
        with pytest.raises(ConnectionClosed):
            await hear(client, "error")
        assert client.close_code == 1009
        await until(lambda: len(replica.loop) == 0)


async def test_a_client_that_leaves_ends_its_request_within_a_second(replica: LocalReplica) -> None:
    """In the middle of a long answer; between two segments; without a word, as a process that dies."""
    async with served(ONE, replica) as address:
        for prompt, abrupt in (("word " * 10_000, False), ("word", False), ("word " * 10_000, True)):
            async with connect(address) as client:
                await say(client, prompt=prompt)
                await hear(client, "delta" if len(prompt) > 10 else "segment_end")
                if abrupt:
                    client.transport.abort()
            async with asyncio.timeout(soon_s(1.5)):
                await until(lambda: len(replica.loop) == 0)


@pytest.mark.attack("C17")
async def test_who_sends_far_ahead_is_told_to_wait() -> None:
    with LocalReplica(HUBS, delay_s=0.2) as replica:
        async with served(ONE, replica) as address, connect(address) as client:
            for _ in range(100):
                await say(client, prompt="a b c d e f")
            error = (await hear(client, "error"))[-1]
            assert (error["status"], error["error"]["code"]) == (429, "overloaded")
            with pytest.raises(ConnectionClosed):
                await client.recv()
            assert client.close_code == 1013
            await until(lambda: len(replica.loop) == 0)


@pytest.mark.attack("G3")
async def test_frames_behind_the_last_segment_are_forgiven_only_if_they_are_few() -> None:
    """1. an 'end' that was not needed changes nothing; 2. frames that go on coming end the request, and say why"""
    with LocalReplica(HUBS, delay_s=0.05) as replica:
        async with served(ONE, replica) as address:
            async with connect(address) as client:
                await say(client, prompt="a b c", last=True)
                await client.send('{"type": "end"}')
                assert text(await hear(client, "done")) == "a b c"
            async with connect(address) as client:
                await say(client, prompt="word " * 10_000, last=True)
                for _ in range(20):
                    await client.send("")
                error = (await hear(client, "error"))[-1]
                assert (error["status"], error["error"]["code"]) == (400, "invalid_request")
                assert "behind the last segment" in error["error"]["message"]
                with pytest.raises(ConnectionClosed):
                    await client.recv()
                assert client.close_code == 1008
                await until(lambda: len(replica.loop) == 0, 30.0)


async def test_a_client_that_reads_nothing_is_waited_for_and_holds_up_nobody() -> None:
    """1. small buffers, and an answer larger than them for a client that does not read one frame
    2. nothing is made for it any more, and others are served; 3. it leaves: its place is free
    """
    config = replace(CONFIG, max_queued_outputs=8)
    with LocalReplica(HUBS, capacity=2, delay_s=0.0005) as replica, socket.socket() as narrow:
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        async with served(ONE, replica, config=config) as address:
            narrow.connect(("127.0.0.1", urlsplit(address).port))
            async with (
                connect(address, sock=narrow, max_queue=1, close_timeout=0.1) as slow,
                connect(address) as other,
            ):
                await say(slow, prompt="word " * 6000)
                await until(lambda: len(replica.engine.begun) > 0)
                for number in range(3):
                    await say(other, prompt="to be", last=number == 2)
                    assert text(await hear(other, "segment_end")) == "to be"
                await until(lambda: not replica.engine.has_unfinished(), 30.0)
                (speech,) = replica.engine._speeches.values()
                assert len(speech.said) < 6000
                slow.transport.abort()
                await until(lambda: len(replica.loop) == 0, 30.0)


async def test_errors_come_with_the_status_they_have_elsewhere(replica: LocalReplica) -> None:
    """Nobody to serve it: 503. Its time over: 504. A model that is not here: 404."""
    async with served(ONE) as address, connect(address) as client:
        await say(client, prompt="one", last=True)
        assert (await hear(client, "error"))[-1]["status"] == 503
    async with served(ONE, replica) as address:
        async with connect(address) as client:
            await say(client, prompt="one", timeout=0.3)
            frames = await hear(client, "error")
            assert (text(frames), frames[-1]["status"]) == ("one", 504)
        async with connect(address) as client:
            await say(client, prompt="one", model="other")
            assert (await hear(client, "error"))[-1]["status"] == 404


@pytest.mark.attack("A5")
async def test_frames_that_are_nested_deep_are_refused_and_take_no_place(replica: LocalReplica) -> None:
    """Also of a depth that can be read and not be written: the answer comes at once, and the next is served."""
    async with served(ONE, replica) as address:
        for depth in (64, 500, *range(970, 990, 2), 100_000):
            async with connect(address) as client:
                await client.send(f'{{"type": "segment", "messages": [{{"x": {"[" * depth}{"]" * depth}}}]}}')
                (error,) = await hear(client, "error")
                assert (error["status"], error["error"]["code"]) == (400, "invalid_request")
        async with connect(address) as client:
            await say(client, prompt="still there", last=True)
            assert text(await hear(client, "done")) == "still there"


@pytest.mark.attack("P24")
async def test_a_stream_whose_key_is_taken_back_ends_though_its_client_says_nothing(replica: LocalReplica) -> None:
    """It went on for as long as the request may take, with every segment answered. That of another client goes on."""
    ring = KeyRing(from_etcd=True)
    ring.replace({"alice": digest_of("secret"), "bob": digest_of("other")})
    async with hub_of(ONE, replica) as omni:
        listeners = bind("127.0.0.1", 0)
        server = HttpServer(omni, Door(build_app(omni, deploy_of(ONE), 0), Locks(ring), lambda _: None, lambda _: None))
        server.start(listeners)
        address = f"ws://127.0.0.1:{listeners[0].getsockname()[1]}/v1/stream"
        try:
            async with (
                connect(address, additional_headers={"Authorization": "Bearer secret"}) as alice,
                connect(address, additional_headers={"Authorization": "Bearer other"}) as bob,
            ):
                for client in (alice, bob):
                    await say(client, prompt="to be")
                    assert text(await hear(client, "segment_end")) == "to be"
                ring.replace({"bob": digest_of("other")})
                (refusal,) = await hear(alice, "error")
                assert (refusal["status"], refusal["error"]["code"]) == (401, "invalid_api_key")
                with pytest.raises(ConnectionClosed):
                    await alice.recv()
                assert alice.close_code == 1008
                await say(bob, prompt="or not", last=True)
                assert text(await hear(bob, "done")) == "or not"
        finally:
            await server.stop()
