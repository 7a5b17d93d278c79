"""`omni serve --api vllm-omni` with a tiny speaking model: vLLM-Omni's server, a hub, etcd and real replicas.

Run by the environment that `make omni-test` makes: the server runs in the hub's own Python.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import os
import signal
import wave
from collections.abc import Iterator
from typing import Any

import openai
import pytest

if importlib.util.find_spec("vllm_omni") is None:
    pytest.skip("vLLM-Omni has an environment of its own: make omni-test", allow_module_level=True)

from tests.support.hub import Hub
from tests.support.processes import wait_for
from tests.support.tiny_qwen3_tts import write_model

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

BOTH = (
    "async_chunk: true, connector_extra: {codec_chunk_frames: 4, initial_codec_chunk_frames: 1}, "
    "enforce_eager: true, kv_cache_memory_bytes: 33554432, max_num_seqs: 4"
)
DEPLOY = """
model: tiny-tts
async_chunk: true
stages:
  - stage_id: 0
    engine: vllm-omni
    model: {model}
    engine_args: {{{both}, max_model_len: 1024, dtype: bfloat16}}
    default_sampling_params: {{speaker: ethan, language: English, max_tokens: 160, seed: 7}}
    runtime: {{devices: cpu, num_replicas: 1}}
  - stage_id: 1
    engine: vllm-omni
    model: {model}
    engine_args: {{{both}, max_model_len: 8192, max_num_batched_tokens: 8192, dtype: float32}}
    runtime: {{devices: cpu, num_replicas: 2}}
    final_output: audio
"""
FLAGS = ("--api", "vllm-omni", "--api-args=--chat-template '{{ messages[-1].content }}'")
_READY_S = 600.0
_MOST_KILLS = 6


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("omni")
    model = folder / "tiny-tts"
    write_model(model)
    variables = {"SPEAKER_SAMPLES_DIR": str(folder / "voices"), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    (folder / "deploy.yaml").write_text(DEPLOY.format(model=model, both=BOTH))
    running = Hub(folder, ["--deploy-config", str(folder / "deploy.yaml"), *FLAGS], variables=variables)
    try:
        yield running.wait_ready(_READY_S)
    finally:
        left = running.stop()
    assert not left, running.text[-3000:]


@pytest.fixture(scope="module")
def client(hub: Hub) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{hub.url}/v1", api_key="none", timeout=300, max_retries=0) as client:
        yield client


def spoken(client: openai.OpenAI, on_third: Any = None) -> bytes:
    """The samples of one streamed speech; ``on_third`` is called when three pieces of it were heard."""
    asked = client.audio.speech.with_streaming_response.create(
        model="tiny-tts",
        voice="ethan",
        input="hello world",
        response_format="pcm",
        extra_body={"stream_format": "audio", "language": "English"},
    )
    heard: list[bytes] = []
    with asked as answer:
        for piece in answer.iter_bytes():
            heard.append(piece)
            if len(heard) == 3 and on_third is not None:
                on_third()
    return b"".join(heard)


def decoders(hub: Hub) -> list[int]:
    """The process ids of the replicas that make sound of codes."""
    return [each["pid"] for each in hub.replicas() if each["stage_id"] == 1]


def test_a_speech_is_the_same_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.audio.speech.create(
        model="tiny-tts",
        voice="ethan",
        input="hello world",
        response_format="pcm",
        extra_body={"language": "English"},
    ).content
    assert len(set(whole)) > 100, "that is silence"
    assert spoken(client) == whole


def test_a_chat_is_answered_with_sound(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny-tts",
        messages=[{"role": "user", "content": "hello world"}],
        modalities=["audio"],  # type: ignore[list-item]
    )
    sound = answer.choices[0].message.audio
    assert sound is not None
    with wave.open(io.BytesIO(base64.b64decode(sound.data))) as file:
        assert file.getframerate() == 24000
        assert file.readframes(file.getnframes()) == spoken(client)


def test_no_sample_is_missing_or_heard_twice_when_a_decoder_dies(hub: Hub, client: openai.OpenAI) -> None:
    """Decoders are killed while a client listens, until it was the client's own."""
    expected = spoken(client)
    wait_for("both decoders", lambda: len(decoders(hub)) == 2, _READY_S)
    for number in range(_MOST_KILLS):
        killed = decoders(hub)[number % 2]
        assert spoken(client, on_third=lambda: os.kill(killed, signal.SIGKILL)) == expected  # noqa: B023
        if "replica.lost_at_work replica=1/" in hub.text:
            break
        wait_for("another decoder", lambda: len(set(decoders(hub)) - {killed}) == 2, _READY_S)  # noqa: B023
    assert "replica.lost_at_work replica=1/" in hub.text
    assert "request.failed" not in hub.text
