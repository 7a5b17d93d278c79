"""Two stages of ordinary Python, over real sockets and connectors: words from one, sound of them from the other."""

from __future__ import annotations

import base64
import io
import json
import wave
from collections.abc import AsyncIterator
from contextlib import ExitStack

import httpx
import numpy as np
import pytest
from openai import AsyncOpenAI

from hub.api.routes import build_app
from hub.async_omni import AsyncOmni
from hub.omni import BatchOptions, run_batch
from omni_discovery.errors import EngineFailedError
from stage_runtime.engines.base import create_engine
from tests.support.hub_fakes import deploy_of
from tests.support.local_replica import LocalReplica
from tests.support.serving import HUBS, hub_of

SINGER = """
model: singer
stages:
  - stage_id: 0
    engine: torch
    engine_args: {target: "tests.support.callables:speak", capacity: 2}
    final_output: text
  - stage_id: 1
    engine: torch
    engine_args: {target: "tests.support.callables:sing", sample_rate_hz: 8000}
    final_output: audio
"""
TEXT = "to be or not "


@pytest.fixture
async def omni() -> AsyncIterator[AsyncOmni]:
    deploy = deploy_of(SINGER)
    with ExitStack() as stack:
        replicas = []
        for stage in deploy.stages:
            engine = create_engine(stage)
            engine.load(lambda _phase, _progress: None)
            more = {"stage_id": stage.stage_id, "replica_id": stage.stage_id, "epoch": 70 + stage.stage_id}
            replicas.append(stack.enter_context(LocalReplica(HUBS, deploy=deploy, engine=engine, **more)))
        async with hub_of(SINGER, *replicas) as running:
            yield running


@pytest.fixture
async def client(omni: AsyncOmni) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=build_app(omni, deploy_of(SINGER), 0))
    async with httpx.AsyncClient(transport=transport, base_url="http://hub/v1") as made:
        yield made


def samples_of(file: bytes) -> list[int]:
    with wave.open(io.BytesIO(file)) as reader:
        assert (reader.getframerate(), reader.getnchannels(), reader.getsampwidth()) == (8000, 1, 2)
        return np.frombuffer(reader.readframes(reader.getnframes()), "<i2").tolist()


SUNG = [round(ord(letter) / 256 * 32767) for letter in TEXT]


async def test_a_client_of_openai_gets_the_words_and_their_sound(client: httpx.AsyncClient) -> None:
    """The pieces of sound come as one file; hand-offs that travel in pieces make the same."""
    openai = AsyncOpenAI(base_url="http://hub/v1", api_key="none", http_client=client, max_retries=0)
    for async_chunk in (False, True):
        answer = await openai.chat.completions.create(
            model="singer", messages=[{"role": "user", "content": TEXT}], extra_body={"async_chunk": async_chunk}
        )
        (choice,) = answer.choices
        assert choice.message.content == TEXT
        assert choice.message.audio is not None
        assert samples_of(base64.b64decode(choice.message.audio.data)) == SUNG


async def test_a_stream_has_each_piece_of_sound_as_a_file_of_its_own(client: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": TEXT}], "modalities": ["audio"], "stream": True}
    response = await client.post("/chat/completions", json=body)
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    deltas = [event["choices"][0]["delta"] for event in events if event["modality"] == "audio"]
    files = [base64.b64decode(delta["audio"]["data"]) for delta in deltas if "data" in delta.get("audio", {})]
    assert len(files) == 2
    assert [sample for file in files for sample in samples_of(file)] == SUNG
    assert ["id" in delta["audio"] for delta in deltas if "audio" in delta] == [True, False, False]


async def test_in_a_batch_what_user_code_raises_fails_its_prompt_only(omni: AsyncOmni) -> None:
    good, bad = await run_batch(omni, [TEXT, "FAIL"], BatchOptions(2, 20.0), lambda: None)
    assert good.text == TEXT
    assert good.audio is not None
    assert samples_of(good.audio) == SUNG
    assert isinstance(bad.error, EngineFailedError)
    assert "it was told to fail" in str(bad.error)


async def test_what_does_not_fit_the_input_is_a_400_that_names_the_field(client: httpx.AsyncClient) -> None:
    for params, named in (({"repeat": "x"}, "repeat"), ({"temperature": 1.0}, "'temperature'")):
        body = {"messages": [{"role": "user", "content": TEXT}], "sampling_params_list": [params]}
        response = await client.post("/chat/completions", json=body)
        assert response.status_code == 400
        assert named in response.json()["error"]["message"]
