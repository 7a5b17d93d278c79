"""Chats that are answered with sound, asked by OpenAI's own clients over HTTP, of real replicas."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import av
import httpx
import pytest
from openai import APIError, AsyncOpenAI, BadRequestError, InternalServerError

from tests.support.speaking import DRAWER, GO_ON, SPEAKER, WORD, Served, samples_in, served, spoken

TEXT = "one two three"
ASK: Any = {"model": "speaker", "messages": [{"role": "user", "content": TEXT}]}
BOTH = ["text", "audio"]


@pytest.fixture
async def hub() -> AsyncIterator[Served]:
    async with served(SPEAKER) as running:
        yield running


@pytest.fixture
async def client(hub: Served) -> AsyncIterator[AsyncOpenAI]:
    async with hub.client as made:
        yield made


def pcm(chunks: list[Any]) -> bytes:
    """The samples of a stream, each piece decoded by itself."""
    return b"".join(base64.b64decode(each.data) for each in audios(chunks) if each.data)


def audios(chunks: list[Any]) -> list[Any]:
    return [each.choices[0].delta.audio for each in chunks if each.choices and each.choices[0].delta.audio]


async def test_one_choice_holds_the_words_and_their_sound(hub: Served, client: AsyncOpenAI) -> None:
    """The same for the asynchronous and the synchronous client."""
    asked: Any = {**ASK, "modalities": BOTH, "audio": {"voice": "default", "format": "wav"}}
    answers = [await client.chat.completions.create(**asked)]

    def ask() -> Any:
        with hub.sync_client as sync:
            return sync.chat.completions.create(**asked)

    answers.append(await asyncio.to_thread(ask))
    for answer in answers:
        (choice,) = answer.choices
        assert (choice.index, choice.finish_reason, choice.message.content) == (0, "stop", TEXT + " ")
        audio = choice.message.audio
        assert audio is not None
        assert (audio.transcript, audio.id[:6]) == (choice.message.content, "audio-")
        assert audio.expires_at == answer.created
        assert samples_in(base64.b64decode(audio.data)) == spoken(TEXT)


async def test_a_stream_carries_raw_samples_in_openais_order(hub: Served, client: AsyncOpenAI) -> None:
    asked: Any = {**ASK, "modalities": BOTH, "audio": {"voice": "default", "format": "pcm16"}, "stream": True}

    def ask() -> list[Any]:
        with hub.sync_client as sync:
            return list(sync.chat.completions.create(**asked))

    for chunks in (
        [each async for each in await client.chat.completions.create(**asked)],
        await asyncio.to_thread(ask),
    ):
        assert {choice.index for chunk in chunks for choice in chunk.choices} == {0}
        heard = audios(chunks)
        assert heard[0].id is not None
        assert not any(each.id for each in heard[1:])
        assert "".join(each.transcript or "" for each in heard).split() == TEXT.split()
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks).split() == TEXT.split()
        assert pcm(chunks) == spoken(TEXT)
        assert (heard[-1].expires_at, heard[-1].data, heard[-1].id) == (chunks[0].created, None, None)
        assert [each.choices[0].finish_reason for each in chunks if each.choices[0].finish_reason] == ["stop"]
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert {each.model_extra["modality"] for each in chunks} == set(BOTH)


async def test_sound_alone_is_sound_alone(client: AsyncOpenAI) -> None:
    asked: Any = {**ASK, "modalities": ["audio"], "audio": {"voice": "bob", "format": "pcm16"}}
    (choice,) = (await client.chat.completions.create(**asked)).choices
    assert choice.message.content is None
    assert choice.message.audio is not None
    assert base64.b64decode(choice.message.audio.data) == spoken(TEXT, speaker="bob")
    chunks = [each async for each in await client.chat.completions.create(**asked, stream=True)]
    assert not any(each.choices[0].delta.content for each in chunks)
    assert pcm(chunks) == spoken(TEXT, speaker="bob")


@pytest.mark.parametrize("name", ["mp3", "flac", "opus", "aac"])
async def test_other_formats_are_files_that_play_whole_and_streamed(client: AsyncOpenAI, name: str) -> None:
    asked: Any = {**ASK, "modalities": ["audio"], "audio": {"voice": "default", "format": name}}
    (choice,) = (await client.chat.completions.create(**asked)).choices
    assert choice.message.audio is not None
    chunks = [each async for each in await client.chat.completions.create(**asked, stream=True)]
    for file in (base64.b64decode(choice.message.audio.data), pcm(chunks)):
        with av.open(io.BytesIO(file)) as container:
            frames = list(container.decode(audio=0))
        seconds = sum(each.samples / each.sample_rate for each in frames)
        assert seconds == pytest.approx(3 * WORD / 24_000, abs=0.2)


async def test_a_stream_that_says_nothing_of_its_sound_has_wav_files_as_vllm_omni_has(hub: Served) -> None:
    """What `vllm bench serve --omni` sends, and how it reads the answer."""
    body = {
        **ASK,
        "stream": True,
        "temperature": 0.0,
        "max_tokens": 64,
        "ignore_eos": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{hub.address}/v1/chat/completions", json=body)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    sound, words = b"", ""
    for event in (each for each in events if each["choices"]):
        delta = event["choices"][0]["delta"]
        content = delta.get("content") or delta.get("audio", {}).get("data")
        if event["modality"] == "audio" and content:
            sound += samples_in(base64.b64decode(content))
        elif event["modality"] == "text":
            words += content or ""
        assert "usage" in event
    assert (sound, words.split()) == (spoken(TEXT), TEXT.split())
    assert events[-1]["choices"] == []


async def test_several_answers_come_side_by_side(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**ASK, n=3, modalities=BOTH)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.message.audio is not None
        assert samples_in(base64.b64decode(choice.message.audio.data)) == spoken(TEXT)
    asked: Any = {**ASK, "n": 2, "modalities": BOTH, "audio": {"format": "pcm16", "voice": "default"}, "stream": True}
    chunks = [each async for each in await client.chat.completions.create(**asked)]
    for index in (0, 1):
        assert pcm([each for each in chunks if each.choices[0].index == index]) == spoken(TEXT)


async def test_what_can_not_be_given_is_refused_with_what_can(client: AsyncOpenAI) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"audio": {"voice": "default", "format": "midi"}}, "there are wav, pcm16, mp3, opus, aac, flac"),
        ({"modalities": ["video"]}, "'video' was asked for; this pipeline puts out text, audio"),
        ({"modalities": ["text"], "audio": {"voice": "a", "format": "wav"}}, "no sound is asked for"),
        ({"logprobs": True}, "engine 'torch', which gives none"),
        ({"extra_body": {"min_p": 0.5}}, "the parameter 'min_p' is not known to this stage"),
    ]
    for more, said in refused:
        with pytest.raises(BadRequestError, match=said):
            await client.chat.completions.create(**{**ASK, **more})


async def test_a_stage_that_fails_amid_the_sound_is_told_in_the_stream(client: AsyncOpenAI) -> None:
    asked: Any = {**ASK, "messages": [{"role": "user", "content": "one two FAIL four"}], "modalities": ["audio"]}
    with pytest.raises(InternalServerError, match="it was told to fail"):
        await client.chat.completions.create(**asked)
    heard: list[Any] = []
    stream = await client.chat.completions.create(**asked, stream=True, audio={"voice": "default", "format": "pcm16"})
    with pytest.raises(APIError, match="it was told to fail"):
        heard += [each async for each in stream]


async def test_a_stage_that_is_lost_amid_the_sound_is_told_in_the_stream(hub: Served, client: AsyncOpenAI) -> None:
    """1. the first word is heard; 2. the only voice is gone; 3. the client gets an error and not a cut connection"""
    asked: Any = {**ASK, "messages": [{"role": "user", "content": "one WAIT three"}], "modalities": ["audio"]}
    stream = await client.chat.completions.create(**asked, stream=True, audio={"voice": "default", "format": "pcm16"})
    heard = await anext(stream)
    assert heard.choices[0].delta.audio.data
    hub.replicas[1].server.close()
    with pytest.raises(APIError) as lost:
        async for _ in stream:
            pass
    assert lost.value.code in ("replica_lost", "stage_unavailable")
    GO_ON.set()


async def test_asking_for_words_and_picture_counts_the_prompt_once() -> None:
    """Whole, streamed, and for two answers; both stages have read it."""
    async with served(DRAWER) as hub, hub.client as client:
        create = partial(client.chat.completions.create, **{**ASK, "model": ""})
        counts = []
        for modalities in (["text"], ["text", "image"]):
            answers = [await create(modalities=modalities), await create(modalities=modalities, n=2)]
            stream = await create(modalities=modalities, stream=True, stream_options={"include_usage": True})
            *_, last = [each async for each in stream]
            counts += [each.usage.prompt_tokens for each in (*answers, last) if each.usage is not None]
    assert counts == [3] * 6


@pytest.mark.attack("C12")
async def test_files_of_every_kind_reach_the_first_stage_as_they_are() -> None:
    """And tools' and developers' messages do. The echo names what it was shown, with size and checksum."""
    data = base64.b64encode(b"file").decode()
    parts: Any = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/flac;base64,{data}"}},
        {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}"}},
    ]
    messages: Any = [
        {"role": "developer", "content": "look and listen"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {}}]},
        {"role": "tool", "tool_call_id": "c", "content": "74"},
        {"role": "user", "content": parts},
    ]
    document = "stages: [{stage_id: 0, engine: echo, final_output: text}]"
    async with served(document) as hub, hub.client as client:
        answer = await client.chat.completions.create(model="", messages=messages)
        said = [word.split(";")[0] for word in str(answer.choices[0].message.content).split()]
        assert said == ["<image/png", "<image/png", "<audio/wav", "<audio/flac", "<video/mp4"]
        for link in ("https://example.org/x.wav", "file:///etc/passwd"):
            parts[3]["audio_url"]["url"] = link
            with pytest.raises(BadRequestError, match="nothing is fetched"):
                await client.chat.completions.create(model="", messages=messages)
