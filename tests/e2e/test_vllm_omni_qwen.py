"""The whole product with tiny Qwen2.5-Omni and Qwen3-Omni models: text and sound over HTTP, replicas killed amid them.

Needs the environment that `make omni-test` makes; `make omni-long` runs it.
"""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import threading
import urllib.request
import wave
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.attackers import cpu_s
from tests.support.hub import Hub
from tests.support.omni_cluster import MARKS, PYTHON, hub_with, write_model
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
#: So much processor time is no heartbeat.
_AT_WORK_S = 0.04
MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello world"}]


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
        before = {pid: cpu_s(pid) for pid in self._pids}
        while not self._is_over.wait(0.01):
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
    reads and hears what it would have, sample by sample.
    """
    expected = listen(hub)
    lost = f"replica.lost_at_work replica={stage_id}/"
    before = hub.text.count(lost)
    for _ in range(_MOST_TRIES):
        wait_for("both replicas", lambda: len(replicas(hub, stage_id)) == 2, _READY_S)
        killer = Killer(stage_id, replicas(hub, stage_id), expected)
        heard = listen(hub, killer)
        killer.join()
        assert heard.error == ""
        assert (heard.text, heard.samples) == (expected.text, expected.samples)
        if hub.text.count(lost) > before:
            break
        if killer.killed is not None:
            wait_for("its end", lambda: killer.killed not in replicas(hub, stage_id), _READY_S)  # noqa: B023
    assert hub.text.count(lost) > before
    assert "request.failed" not in hub.text
