"""The whole product with tiny Qwen2.5-Omni and Qwen3-Omni models: text and sound over HTTP, files in, replicas killed.

Needs the environment that `make omni-test` makes; `make omni-long` runs it.
"""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import threading
import time
import urllib.request
import wave
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.attackers import cpu_s
from tests.support.hub import Hub
from tests.support.omni_cluster import MARKS, PYTHON, assert_same_sound, hub_with, write_model
from tests.support.omni_media import clip, sine
from tests.support.processes import wait_for

pytestmark = [*MARKS, pytest.mark.long]

DEPLOY = """
model: {kind}
async_chunk: {pieces}
stages:
  - stage_id: 0
    engine: vllm-omni
    model: {model}
    engine_args: {{{every}, max_num_seqs: 4, max_model_len: 2048}}
    runtime: {{devices: cpu, num_replicas: 2, python: {python}}}
    final_output: text
  - stage_id: 1
    engine: vllm-omni
    model: {model}
    engine_args: {{{every}, max_num_seqs: 4, max_model_len: 2048}}
    runtime: {{devices: cpu, num_replicas: 2, python: {python}}}
  - stage_id: 2
    engine: vllm-omni
    model: {model}
    engine_args: {{{every}, max_num_seqs: {decoders}, max_model_len: 8192, max_num_batched_tokens: 8192}}
    runtime: {{devices: cpu, num_replicas: 2, python: {python}}}
    final_output: audio
"""
EVERY = "async_chunk: {pieces}, enforce_eager: true, kv_cache_memory_bytes: 33554432"
CHUNKS = ", connector_extra: {codec_chunk_frames: 8, initial_codec_chunk_frames: 4, codec_left_context_frames: 8}"
KINDS = {
    "qwen2_5_omni": {"pieces": "false", "decoders": 1, "every": EVERY + ", dtype: float32"},
    "qwen3_omni_moe": {"pieces": "true", "decoders": 4, "every": EVERY + ", dtype: bfloat16, moe_backend: auto"},
}
_READY_S = 240.0
_MOST_TRIES = 6
#: So much processor time within so long is no heartbeat.
_AT_WORK_S, _WITHIN_S = 0.04, 0.3
MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello world"}]
_QUESTION = [{"type": "text", "text": "what is this"}]


@pytest.fixture(scope="module", params=list(KINDS))
def hub(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    kind: str = request.param
    folder = tmp_path_factory.mktemp("omni")
    model = write_model(folder, "tiny_qwen_omni", kind)
    known = dict(KINDS[kind])
    every = str(known.pop("every")).format(pieces=known["pieces"]) + (CHUNKS if known["pieces"] == "true" else "")
    document = DEPLOY.format(kind=kind, model=model, python=PYTHON, every=every, **known)
    with hub_with(folder, document, ready_s=600.0) as running:
        yield running


@pytest.fixture(scope="module")
def beside(hub: Hub) -> Iterator[Hub]:
    """A hub without stages, with vLLM-Omni's own server, in front of the same replicas."""
    folder = hub.folder / "beside"
    folder.mkdir()
    flags = ["--deploy-config", str(hub.folder / "deploy.yaml"), "--hub-only", "--api", "vllm-omni"]
    variables = {"HF_HUB_OFFLINE": "1", "SPEAKER_SAMPLES_DIR": str(folder / "voices")}
    running = Hub(folder, [*flags, "--etcd-endpoints", hub.endpoint], hub.namespace, variables, PYTHON)
    try:
        yield running.wait_ready(_READY_S)
    finally:
        left = running.stop()
    assert not left, running.text[-3000:]


@dataclass
class Heard:
    """One streamed answer: its text, its samples, and the error that ended it."""

    texts: list[str] = field(default_factory=list)
    sounds: list[bytes] = field(default_factory=list)
    error: str = ""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def samples(self) -> bytes:
        return b"".join(self.sounds)


def listen(hub: Hub, on_event: Callable[[Heard], None] = lambda _: None, **fields: Any) -> Heard:
    """Ask, and hear the answer; ``on_event`` is called behind each event that brings text or sound."""
    params = [{"max_tokens": 48, "temperature": 0.0, "seed": 7}, {"max_tokens": 200, "seed": 7}, {"seed": 7}]
    body = {"messages": MESSAGES, "stream": True, "sampling_params_list": params, **fields}
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{hub.url}/v1/chat/completions", data, {"Content-Type": "application/json"})
    heard = Heard()
    with urllib.request.urlopen(request, timeout=240) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                heard.error = event["error"]["message"]
                return heard
            for choice in event["choices"]:
                delta = choice["delta"]
                if isinstance(delta.get("content"), str) and delta["content"]:
                    heard.texts.append(delta["content"])
                    on_event(heard)
                if data64 := (delta.get("audio") or {}).get("data"):
                    heard.sounds.append(samples_of(base64.b64decode(data64)))
                    on_event(heard)
    return heard


def samples_of(sound: bytes) -> bytes:
    """The samples of a WAV file, or of sound that comes without a head."""
    if not sound.startswith(b"RIFF"):
        return sound
    with wave.open(io.BytesIO(sound)) as file:
        assert file.getframerate() == 24000
        return file.readframes(file.getnframes())


def replicas(hub: Hub, stage_id: int) -> list[int]:
    """The process ids of a stage's replicas that serve."""
    return [each["pid"] for each in hub.replicas() if each["stage_id"] == stage_id and each["status"] == "up"]


def test_text_and_sound_come_of_a_chat_the_same_every_time(hub: Hub) -> None:
    first, again = listen(hub), listen(hub)
    assert (first.error, again.error) == ("", "")
    assert len(first.texts) > 3
    assert first.text.split()[0].startswith("w")
    assert len(set(first.samples)) > 100, "that is silence"
    assert (again.text, again.samples) == (first.text, first.samples)
    whole = hub.post({"messages": MESSAGES, "modalities": ["text"], "sampling_params_list": [{"max_tokens": 8}]})
    assert whole[0] == 200
    assert whole[1]["choices"][0]["message"]["content"].split()[0] == first.text.split()[0]


#: All that sampling takes: vLLM-Omni's server fills in vLLM's own defaults, not those of the pipeline.
SAMPLING = [
    {"max_tokens": 24, "temperature": 0.0, "repetition_penalty": 1.1, "seed": 7},
    {"max_tokens": 60, "temperature": 0.9, "top_k": 40, "top_p": 0.8, "repetition_penalty": 1.05, "seed": 7},
    {"max_tokens": 4096, "temperature": 0.0, "repetition_penalty": 1.1, "seed": 7},
]


def part(kind: str, file: bytes, form: str) -> dict[str, Any]:
    url = f"data:{form};base64,{base64.b64encode(file).decode()}"
    return {"type": kind, kind: {"url": url}}


def said_of(
    hub: Hub, parts: Sequence[Mapping[str, Any]], sampling: Any = SAMPLING, **more: Any
) -> tuple[int, str, bytes]:
    """The tokens of the prompt, the text and the samples of a whole answer."""
    content = [*parts, *_QUESTION]
    body = {"messages": [{"role": "user", "content": content}], "sampling_params_list": sampling, **more}
    status, answer = hub.post(body)
    assert status == 200, answer
    messages = [choice["message"] for choice in answer["choices"]]
    text = "".join(message.get("content") or "" for message in messages)
    files = [message["audio"]["data"] for message in messages if message.get("audio")]
    sound = b"".join(samples_of(base64.b64decode(file)) for file in files)
    assert len(set(sound)) > 100, "that is silence"
    return int(answer["usage"]["prompt_tokens"]), text, sound


def test_sound_and_videos_are_heard_and_seen_whichever_server_is_asked(hub: Hub, beside: Hub) -> None:
    """1. each file takes places in the thinker's prompt, and what is spoken changes with it
    2. vLLM-Omni's own server in another hub says the same, sample by sample
    """
    high, low = (part("audio_url", sine(pitch_hz), "audio/wav") for pitch_hz in (1200, 300))
    spoken = {
        "type": "input_audio",
        "input_audio": {"data": high["audio_url"]["url"].partition(",")[2], "format": "wav"},
    }
    film = part("video_url", clip(), "video/mp4")
    asks: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
        "nothing": ([], {}),
        "low": ([low], {}),
        "high": ([high], {}),
        "input": ([spoken], {}),
        "film": ([film], {}),
        "loud film": ([film], {"mm_processor_kwargs": {"use_audio_in_video": True}}),
        "both": ([film, low], {}),
    }
    ours = {name: said_of(hub, parts, **more) for name, (parts, more) in asks.items()}
    tokens = {name: answer[0] for name, answer in ours.items()}
    assert tokens["nothing"] < tokens["low"] == tokens["high"] < tokens["film"] < tokens["both"]
    assert tokens["film"] < tokens["loud film"]
    assert ours["input"] == ours["high"]
    assert len({answer[2] for answer in ours.values()}) == len(ours) - 1
    for name, (parts, more) in asks.items():
        theirs = said_of(beside, parts, **more)
        assert theirs[:2] == ours[name][:2], name
        assert_same_sound(theirs[2], ours[name][2])


def test_what_no_file_is_is_the_clients_mistake_and_vllms_defaults_are_spoken(hub: Hub, beside: Hub) -> None:
    """A list of vLLM-Omni's server that says nothing of penalties asks for none, of the talker too."""
    for server in (hub, beside):
        for broken in (part("audio_url", b"no sound", "audio/wav"), part("video_url", b"no film", "video/mp4")):
            message = {"role": "user", "content": [broken]}
            status, answer = server.post({"messages": [message], "sampling_params_list": SAMPLING})
            assert status == 400, answer
    said_of(beside, [], [{"max_tokens": most, "seed": 7} for most in (8, 20, 4096)])
    assert "replica.lost" not in hub.text


class Killer:
    """Kills the replica of a stage that works for a client, once the client hears that stage's part of an answer."""

    def __init__(self, stage_id: int, pids: list[int], expected: Heard) -> None:
        self._stage_id, self._pids, self._expected = stage_id, pids, expected
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._kill_the_one_at_work)
        self.killed: int | None = None

    def __call__(self, heard: Heard) -> None:
        """See ``listen``: called behind each event."""
        is_whole = len(self._expected.sounds) == 1
        if self._stage_id == 0:
            has_begun = len(heard.texts) > 2
        else:
            has_begun = bool(heard.sounds) or (is_whole and heard.text == self._expected.text)
        if has_begun and self._thread.ident is None:
            self._thread.start()

    def _kill_the_one_at_work(self) -> None:
        since_s, before = 0.0, dict[int, float]()
        while not self._is_over.wait(0.01):
            if time.monotonic() - since_s > _WITHIN_S:
                since_s, before = time.monotonic(), {pid: cpu_s(pid) for pid in self._pids}
            for pid in self._pids:
                if cpu_s(pid) - before[pid] >= _AT_WORK_S:
                    os.kill(pid, signal.SIGKILL)
                    self.killed = pid
                    return

    def join(self) -> None:
        self._is_over.set()
        self._thread.join(_READY_S)


@pytest.mark.parametrize("stage_id", [2, 1, 0], ids=["code2wav", "talker", "thinker"])
def test_an_answer_goes_on_when_a_replica_dies_amid_it(hub: Hub, stage_id: int) -> None:
    """Replicas of a stage are killed while they work for a client, until one was lost with its request: the client
    reads and hears what it would have, sample by sample. The thinker was shown a film, which another one sees again.
    """
    film = {"messages": [{"role": "user", "content": [part("video_url", clip(), "video/mp4"), *_QUESTION]}]}
    asked: dict[str, Any] = film if stage_id == 0 else {}
    expected = listen(hub, **asked)
    lost, begin = f"replica.lost_at_work replica={stage_id}/", len(hub.text)
    for _ in range(_MOST_TRIES):
        wait_for("both replicas", lambda: len(replicas(hub, stage_id)) == 2, _READY_S)
        killer = Killer(stage_id, replicas(hub, stage_id), expected)
        heard = listen(hub, killer, **asked)
        killer.join()
        assert heard.error == ""
        assert (heard.text, heard.samples) == (expected.text, expected.samples)
        if lost in hub.text[begin:]:
            break
        if killer.killed is not None:
            wait_for("its end", lambda: killer.killed not in replicas(hub, stage_id), _READY_S)  # noqa: B023
    assert lost in hub.text[begin:]
    assert "request.failed" not in hub.text[begin:]
