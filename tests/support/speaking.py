"""A pipeline that speaks, of ordinary Python without models, behind a hub's HTTP server."""

from __future__ import annotations

import base64
import io
import math
import struct
import threading
import wave
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import av
import msgspec
from openai import AsyncOpenAI, OpenAI

from hub.api.routes import build_app
from hub.api.server import HttpServer
from hub.api.videos.schema import makes_videos
from hub.async_omni import AsyncOmni
from hub.config import HubConfig
from omni_discovery.sockets.listen import bind
from stage_runtime.engines.base import create_engine
from tests.support.filming import jobs_of
from tests.support.hub_fakes import deploy_of
from tests.support.local_replica import LocalReplica
from tests.support.serving import CONFIG, HUBS, hub_of

#: Set where a voice that was told to wait may go on.
GO_ON = threading.Event()

#: Words from one stage, their sound from the next, whose document names a voice.
SPEAKER = """
model: speaker
stages:
  - {stage_id: 0, engine: torch, engine_args: {target: "tests.support.speaking:think", capacity: 8}, final_output: text}
  - stage_id: 1
    engine: torch
    engine_args: {target: "tests.support.speaking:speak", capacity: 8}
    default_sampling_params: {speaker: ann}
    final_output: audio
"""
#: One stage that says what it is given.
VOICE = """
model: voice
stages:
  - stage_id: 0
    engine: torch
    engine_args: {target: "tests.support.speaking:speak", capacity: 8, voices: [bob, ann]}
    default_sampling_params: {speaker: ann, language: English, instruct: calmly}
    final_output: audio
"""
#: As SPEAKER, but it hears, too, and says what it was told: see ``listen``.
LISTENER = SPEAKER.replace("speaking:think", "speaking:listen").replace("model: speaker", "model: listener")
#: What it is told, and the sound of it, unless it is a call of a function.
CALLER = """
model: caller
stages:
  - {stage_id: 0, engine: echo, engine_args: {tool_call_parser: echo}, final_output: text}
  - {stage_id: 1, engine: torch, engine_args: {target: "tests.support.speaking:speak_echo"}, final_output: audio}
"""
#: Words, and a picture of them.
DRAWER = """
model: drawer
stages:
  - {stage_id: 0, engine: echo, final_output: text}
  - {stage_id: 1, engine: echo, engine_args: {modality: image}, final_output: image}
"""
RATE_HZ = 24_000
#: Samples of each word.
WORD = 2400


class Prompt(msgspec.Struct):
    """What is asked."""

    prompt: str = ""
    temperature: float | None = None
    max_tokens: int | None = None
    ignore_eos: bool = False
    repetition_penalty: float = 1.0


class Said(msgspec.Struct):
    """What is to be said, and how."""

    prompt: str = ""
    text: str = ""
    speaker: str = "ann"
    language: str = ""
    instruct: str = ""
    ignore_eos: bool = False
    max_tokens: int = 1000


def think(asked: Prompt) -> Iterator[str | dict[str, str]]:
    """The words, one by one."""
    for word in asked.prompt.split():
        yield word + " "
    yield {"text": asked.prompt}


class Told(Prompt):
    """A whole conversation."""

    messages: list[dict[str, Any]] = []


def listen(told: Told) -> Iterator[str | dict[str, str]]:
    """Say the last message, if it is a text; of a sound its length. The word ALL asks for all messages, one by one."""
    said = [_said(message) for message in told.messages]
    words = " ".join(said) if "ALL" in said[-1] else said[-1].partition(":")[2]
    for word in words.split():
        yield word + " "
    yield {"text": words}


def _said(message: dict[str, Any]) -> str:
    content = message["content"]
    parts: list[dict[str, Any]] = content if isinstance(content, list) else [{"text": content or "(call)"}]
    words = [each["text"] if "text" in each else f"sound-of-{_length_ms(each['input_audio'])}-ms" for each in parts]
    return f"{message['role']}:{' '.join(words)}"


def _length_ms(sound: dict[str, str]) -> int:
    container: Any = av.open(io.BytesIO(base64.b64decode(sound["data"])))
    with container:
        seconds: list[float] = [each.samples / each.sample_rate for each in container.decode(audio=0)]
    return round(1000 * sum(seconds))


def speak(said: Said) -> Iterator[bytes]:
    """A WAV file for each word. The word FAIL fails, WAIT waits for the test, RATE=1 has a header that says 1 Hz."""
    for word in (said.text or said.prompt).split()[: said.max_tokens]:
        if word == "FAIL":
            raise RuntimeError("it was told to fail")
        if word == "WAIT":
            GO_ON.wait(60.0)
        _, is_odd, rate_hz = word.partition("RATE=")
        yield wav_of(samples_of(word, said), int(rate_hz) if is_odd else RATE_HZ)


class Echoed(msgspec.Struct):
    """The words of an echo engine."""

    token_ids: list[int]


def speak_echo(echoed: Echoed) -> Iterator[bytes]:
    """A WAV file for each word."""
    return speak(Said(text=bytes(echoed.token_ids).decode()))


def samples_of(word: str, said: Said) -> bytes:
    """The samples of a word: a tone that the word and the way it is said determine."""
    pitch_hz = 200 + sum(f"{word}|{said.speaker}|{said.language}|{said.instruct}".encode()) % 400
    values = (round(8000 * math.sin(2 * math.pi * pitch_hz * number / RATE_HZ)) for number in range(WORD))
    return b"".join(struct.pack("<h", value) for value in values)


def spoken(text: str, **how: str) -> bytes:
    """All samples of a text."""
    return b"".join(samples_of(word, msgspec.convert(how, Said)) for word in text.split())


def wav_of(samples: bytes, rate_hz: int = RATE_HZ) -> bytes:
    """A WAV file of samples."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate_hz)
        writer.writeframes(samples)
    return file.getvalue()


def samples_in(file: bytes) -> bytes:
    """The samples of a WAV file; its header may say that it is endless."""
    with wave.open(io.BytesIO(file)) as reader:
        assert (reader.getnchannels(), reader.getsampwidth(), reader.getframerate()) == (1, 2, RATE_HZ)
        return bytes(reader.readframes(min(reader.getnframes(), len(file))))


@dataclass(frozen=True)
class Served:
    """A hub's HTTP server, the clients of it, and its replicas."""

    omni: AsyncOmni
    address: str
    replicas: list[LocalReplica]

    @property
    def client(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0)

    @property
    def sync_client(self) -> OpenAI:
        """To be used in another thread than the hub's."""
        return OpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0)


@asynccontextmanager
async def served(document: str, config: HubConfig = CONFIG) -> AsyncIterator[Served]:
    """Serve a document with a replica of each stage."""
    deploy = deploy_of(document)
    GO_ON.clear()
    async with AsyncExitStack() as stack:
        replicas = []
        for stage in deploy.stages:
            engine = create_engine(stage)
            engine.load(lambda _phase, _progress: None)
            place, epoch = stage.stage_id, 70 + stage.stage_id
            replica = LocalReplica(HUBS, deploy=deploy, engine=engine, stage_id=place, epoch=epoch)
            replicas.append(stack.enter_context(replica))
        # Else a replica whose voice waits would not end.
        stack.callback(GO_ON.set)
        async with hub_of(document, *replicas, config=config) as omni:
            listeners = bind("127.0.0.1", 0)
            jobs = await stack.enter_async_context(jobs_of(omni)) if makes_videos(deploy) else None
            server = HttpServer(omni, build_app(omni, deploy, 0, jobs))
            server.start(listeners)
            try:
                yield Served(omni, f"http://127.0.0.1:{listeners[0].getsockname()[1]}", replicas)
            finally:
                GO_ON.set()
                await server.stop()
