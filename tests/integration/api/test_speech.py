"""POST /v1/audio/speech, asked by OpenAI's own clients over HTTP, of a real replica."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import av
import httpx
import pytest
from openai import APIConnectionError, AsyncOpenAI, BadRequestError, InternalServerError

from tests.support.speaking import GO_ON, VOICE, WORD, Served, samples_in, served, spoken

TEXT = "one two three"
PLAIN = {"language": "English", "instruct": "calmly"}
ASK: Any = {"model": "voice", "voice": "default", "input": TEXT}


@pytest.fixture
async def hub() -> AsyncIterator[Served]:
    async with served(VOICE) as running:
        yield running


@pytest.fixture
async def client(hub: Served) -> AsyncIterator[AsyncOpenAI]:
    async with hub.client as made:
        yield made


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


async def hear(http: httpx.AsyncClient, url: str, asked: dict[str, Any], heard: bytearray) -> None:
    """Add to ``heard`` what comes, up to its end or an error."""
    async with http.stream("POST", url, json=asked) as answer:
        async for piece in answer.aiter_bytes():
            heard += piece


def seconds_of(file: bytes) -> float:
    with av.open(io.BytesIO(file)) as container:
        return float(sum(each.samples / each.sample_rate for each in container.decode(audio=0)))


async def test_a_text_is_said_as_one_file(hub: Served, client: AsyncOpenAI) -> None:
    """The same for the asynchronous and the synchronous client; as the voice, the language and the manner say."""

    def ask(**more: Any) -> bytes:
        with hub.sync_client as sync:
            return sync.audio.speech.create(**{**ASK, "response_format": "wav", **more}).content

    plain = (await client.audio.speech.create(**ASK, response_format="wav")).content
    assert samples_in(plain) == samples_in(await asyncio.to_thread(ask)) == spoken(TEXT, **PLAIN)
    more = {"voice": {"id": "bob"}, "instructions": "loudly", "extra_body": {"language": "German"}}
    other = await asyncio.to_thread(lambda: ask(**more))
    assert samples_in(other) == spoken(TEXT, speaker="bob", instruct="loudly", language="German")


@pytest.mark.parametrize(
    ("name", "mime"),
    [("mp3", "audio/mpeg"), ("opus", "audio/ogg"), ("aac", "audio/aac"), ("flac", "audio/flac"), ("wav", "audio/wav")],
)
async def test_every_format_plays_whole_and_streamed(client: AsyncOpenAI, name: Any, mime: str) -> None:
    whole = await client.audio.speech.create(**ASK, response_format=name)
    assert whole.response.headers["content-type"] == mime
    assert int(whole.response.headers["content-length"]) == len(whole.content)
    create = client.audio.speech.with_streaming_response.create
    async with create(**ASK, response_format=name, stream_format="audio") as streamed:
        assert "content-length" not in streamed.headers
        file = await streamed.read()
    for each in (whole.content, file):
        assert seconds_of(each) == pytest.approx(3 * WORD / 24_000, abs=0.2)


async def test_raw_samples_leave_as_they_are_made(hub: Served, client: AsyncOpenAI) -> None:
    """What `vllm bench serve --omni` sends: the first word is there while the second is not said yet."""
    asked = {**ASK, "input": "one WAIT three", "response_format": "pcm", "stream_format": "audio"}
    more = {"stream": True, "ignore_eos": True, "repetition_penalty": 1.0, "max_new_tokens": 2}
    create = client.audio.speech.with_streaming_response.create
    async with create(**asked, extra_body=more) as streamed:
        pieces = streamed.iter_bytes()
        heard = await anext(pieces)
        assert spoken("one", **PLAIN).startswith(heard)
        GO_ON.set()
        heard += b"".join([piece async for piece in pieces])
    assert heard == spoken("one WAIT", **PLAIN)


@pytest.mark.parametrize("how", [{"stream_format": "sse"}, {"stream": True}], ids=str)
async def test_events_have_the_sound_in_pieces_and_the_counts_at_the_end(hub: Served, how: dict[str, Any]) -> None:
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{hub.address}/v1/audio/speech", json={**ASK, "response_format": "pcm", **how})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *deltas, done = events_of(answer.text)
    assert [line for line in answer.text.splitlines() if line.startswith("event: ")] == [
        f"event: {each['type']}" for each in [*deltas, done]
    ]
    assert b"".join(base64.b64decode(each["audio"]) for each in deltas) == spoken(TEXT, **PLAIN)
    assert {each["type"] for each in deltas} == {"speech.audio.delta"}
    counts = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
    assert done == {"type": "speech.audio.done", "usage": counts}


async def test_the_voices_of_the_replicas_are_listed(hub: Served) -> None:
    async with httpx.AsyncClient() as http:
        answer = await http.get(f"{hub.address}/v1/audio/voices")
    assert answer.json() == {"voices": ["ann", "bob"], "uploaded_voices": []}


async def test_speed_makes_it_shorter(client: AsyncOpenAI) -> None:
    made = await client.audio.speech.create(**{**ASK, "input": TEXT * 4}, response_format="pcm", speed=2.0)
    words = len((TEXT * 4).split())
    assert len(made.content) == pytest.approx(words * WORD, rel=0.15)


async def test_what_can_not_be_said_is_refused_with_what_can(client: AsyncOpenAI) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"response_format": "midi"}, "there are wav, pcm, mp3, opus, aac, flac"),
        ({"input": " \n"}, "'input' is empty"),
        ({"speed": 9}, "speed"),
        ({"stream_format": "smoke"}, "stream_format"),
        ({"extra_body": {"ref_audio": "https://example.org/x.wav"}}, "unknown field 'ref_audio'"),
        ({"extra_body": {"task_type": "Base"}}, "the parameter 'task_type' is not known to this stage"),
    ]
    for more, said in refused:
        with pytest.raises(BadRequestError, match=said):
            await client.audio.speech.create(**{**ASK, **more})


async def test_a_pipeline_that_makes_no_sound_says_so() -> None:
    document = "stages: [{stage_id: 0, engine: echo, final_output: text}]"
    async with served(document) as hub, hub.client as client:
        with pytest.raises(BadRequestError, match="this pipeline makes no sound"):
            await client.audio.speech.create(**{**ASK, "model": ""})


@pytest.mark.attack("F4")
@pytest.mark.parametrize("name", ["pcm", "mp3", "wav"])
async def test_sound_of_1_hz_and_of_gigahertz_fails_its_request_and_the_hub_goes_on(
    client: AsyncOpenAI, name: Any
) -> None:
    for rate_hz in (1, 10, 2**31 - 1):
        for speed in (1.0, 0.5):
            with pytest.raises(InternalServerError, match=f"sample rate of {rate_hz} Hz"):
                await client.audio.speech.create(
                    **{**ASK, "input": f"RATE={rate_hz}"}, response_format=name, speed=speed
                )
    assert (await client.audio.speech.create(**ASK, response_format=name)).content


async def test_a_failure_amid_the_sound_reaches_the_client_in_each_form(hub: Served, client: AsyncOpenAI) -> None:
    """Whole: a status. Events: an event. The bare file, which has no place for an error: it is cut, never ended."""
    asked = {**ASK, "input": "one FAIL", "response_format": "pcm"}
    with pytest.raises(InternalServerError, match="it was told to fail"):
        await client.audio.speech.create(**asked)
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{hub.address}/v1/audio/speech", json={**asked, "stream_format": "sse"})
        *_, last = events_of(answer.text)
        assert (last["type"], last["error"]["code"]) == ("speech.audio.error", "engine_failed")
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
            await http.post(f"{hub.address}/v1/audio/speech", json={**asked, "stream_format": "audio"})
    with pytest.raises((APIConnectionError, httpx.RemoteProtocolError)):
        await client.audio.speech.create(**asked, stream_format="audio")


async def test_a_file_that_is_cut_short_leaves_lines_of_ours_and_no_error_of_the_server(
    hub: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """request.failed says why, http.cut that the connection was closed, once a minute; what was made has arrived."""
    asked = {**ASK, "input": "one FAIL", "response_format": "pcm", "stream_format": "audio"}
    async with httpx.AsyncClient(timeout=30.0) as http:
        for _ in range(2):
            heard = bytearray()
            with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
                await hear(http, f"{hub.address}/v1/audio/speech", asked, heard)
            assert heard == spoken("one", **PLAIN)
    of_hub = [each for each in caplog.records if each.name.startswith(("hub.", "uvicorn", "asyncio"))]
    lines = [(each.levelname, each.getMessage()) for each in of_hub if each.levelno >= logging.WARNING]
    assert [line for line in lines if "request.failed" not in line[1]] == [
        ("WARNING", "http.cut reason=cut_short client=127.0.0.1 connections=1: omni_hub_http_cut_total counts them")
    ]
    assert len([line for line in lines if "request.failed" in line[1]]) == 2
    assert hub.omni.metrics.get_sample_value("omni_hub_http_cut_total", {"reason": "cut_short"}) == 2


async def test_a_voice_that_is_lost_amid_the_sound_is_told_in_an_event(hub: Served) -> None:
    asked = {**ASK, "input": "one WAIT three", "response_format": "pcm", "stream_format": "sse"}
    http = httpx.AsyncClient(timeout=30.0)
    async with http, http.stream("POST", f"{hub.address}/v1/audio/speech", json=asked) as answer:
        lines = answer.aiter_lines()
        assert await anext(lines) == "event: speech.audio.delta"
        hub.replicas[0].server.close()
        text = "\n".join([line async for line in lines])
    last = events_of(text)[-1]
    assert last["error"]["code"] in ("replica_lost", "stage_unavailable")
    GO_ON.set()
