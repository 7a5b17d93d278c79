"""Hubs with tiny models in vLLM-Omni's Python; and a speaking model as its users start it: their file, their flags."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import urllib.request
import wave
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from omni_discovery.etcd.embedded import EmbeddedEtcd
from tests.support.hub import Hub
from tests.support.processes import Child

ROOT: Final = Path(__file__).resolve().parents[2]
#: The Python that `make setup-omni` makes.
PYTHON: Final = ROOT / ".venv-omni" / "bin" / "python"
#: The marks of tests that need it.
MARKS: Final = [
    pytest.mark.e2e,
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM-Omni has an environment of its own: make omni-test"),
]
#: A speaking model, with engine arguments for small pieces on a CPU.
_SPEAKING: Final = """
model: tiny-tts
async_chunk: {pieces}
stages:
  - stage_id: 0
    engine: vllm-omni
    model: {model}
    engine_args: {{{both}, max_model_len: 1024, dtype: bfloat16}}
    default_sampling_params: {{speaker: ethan, language: English{defaults}}}
    runtime: {{devices: cpu, num_replicas: {talkers}{python}}}
  - stage_id: 1
    engine: vllm-omni
    model: {model}
    engine_args: {{{both}, max_model_len: 8192, max_num_batched_tokens: 8192, dtype: float32}}
    runtime: {{devices: cpu, num_replicas: {decoders}{python}}}
    final_output: audio
{edges}"""
_BOTH: Final = (
    "async_chunk: {pieces}, connector_extra: {{codec_chunk_frames: 4, initial_codec_chunk_frames: 1}}, "
    "enforce_eager: true, kv_cache_memory_bytes: 33554432, max_num_seqs: 4"
)
#: A deploy file as vLLM-Omni has them: no engine, no model, no output. Small pieces, and what a CPU needs.
THEIRS: Final = """
async_chunk: true
connectors:
  small_pieces:
    name: SharedMemoryConnector
    extra: {codec_chunk_frames: 4, initial_codec_chunk_frames: 1}
stages:
  - stage_id: 0
    max_num_seqs: 4
    max_model_len: 1024
    dtype: bfloat16
    enforce_eager: true
    async_scheduling: true
    kv_cache_memory_bytes: 33554432
    trust_remote_code: true
    output_connectors: {to_stage_1: small_pieces}
    default_sampling_params: {temperature: 0.9, top_k: 50, max_tokens: 32}
  - stage_id: 1
    max_num_seqs: 4
    max_model_len: 8192
    max_num_batched_tokens: 8192
    dtype: float32
    enforce_eager: true
    kv_cache_memory_bytes: 33554432
    trust_remote_code: true
    input_connectors: {from_stage_0: small_pieces}
"""
NAMESPACE: Final = "test"


def write_model(folder: Path, writer: str = "tiny_qwen3_tts", *arguments: str) -> str:
    """Have a module of this folder write a tiny model; return its folder."""
    model = folder / "tiny"
    command = [str(PYTHON), "-m", f"tests.support.{writer}", *arguments, str(model)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    return str(model)


def speaking(
    model: str,
    talkers: int,
    decoders: int = 2,
    *,
    python: Path | None = None,
    defaults: str = "",
    pieces: bool = True,
    edges: str = "",
) -> str:
    """The document of a speaking model, which hands over in ``pieces`` or whole.

    ``python`` runs its replicas, else that of the hub; ``defaults`` are further parameters of its talkers; ``edges`` is
    a line of the document.
    """
    said = {"pieces": str(pieces).lower(), "talkers": talkers, "decoders": decoders, "edges": edges}
    its_python = "" if python is None else f", python: {python}"
    more = f", {defaults}" if defaults else ""
    return _SPEAKING.format(
        model=model, both=_BOTH.format(pieces=said["pieces"]), python=its_python, defaults=more, **said
    )


@contextmanager
def hub_with(folder: Path, document: str, ready_s: float = 300.0) -> Iterator[Hub]:
    """A hub that serves the document with stages of its own; it leaves no process."""
    running = Hub.of_yaml(folder, document)
    try:
        yield running.wait_ready(ready_s)
    finally:
        left = running.stop()
    assert not left, running.text[-3000:]


class Cluster:
    """A host without a hub for each stage, with two replicas, and a hub without stages."""

    def __init__(self, folder: Path, model: str) -> None:
        self.etcd = EmbeddedEtcd()
        self.etcd.__enter__()
        registry = ["--etcd-endpoints", self.etcd.endpoint]
        omni = [model, "--omni", "--omni-python", str(PYTHON)]
        self.hosts = []
        for stage in ("0", "1"):
            here = ["--headless", "--stage-id", stage, "--omni-dp-size-local", "2", "--namespace", NAMESPACE]
            words = ["serve", *omni, *here, *registry]
            self.hosts.append(Child(words, _folder(folder / f"host{stage}"), f"host{stage}"))
        # What is left for the hub: to resolve, and to serve.
        self.hub = Hub.of_yaml(_folder(folder / "hub"), THEIRS, *omni, "--hub-only", *registry)

    def replicas(self, stage_id: int) -> list[int]:
        """The process ids of a stage's replicas that can be picked."""
        told = self.hub.replicas("--etcd-endpoints", self.etcd.endpoint)
        return [each["pid"] for each in told if each["stage_id"] == stage_id and each["status"] == "up"]

    @property
    def text(self) -> str:
        """The end of all logs."""
        return "\n".join(child.text[-2000:] for child in (*self.hosts, self.hub))

    def stop(self) -> list[int]:
        """Stop everything; return the processes that are left."""
        left = [pid for child in (self.hub, *self.hosts) for pid in child.stop()]
        self.etcd.__exit__(None, None, None)
        return left


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def assert_same_sound(heard: bytes, expected: bytes) -> None:
    """Sample by sample, to one step of 16 bits: sums are rounded otherwise in a batch with another request."""
    there, wanted = (np.frombuffer(each, "<i2").astype(np.int32) for each in (heard, expected))
    assert there.size == wanted.size
    assert int(np.abs(there - wanted).max()) <= 1


def speak(
    url: str,
    tokens: int,
    on_piece: Callable[[], None] = lambda: None,
    number: int = 3,
    least: int = 4,
    **talkers: Any,
) -> bytes:
    """The samples of one streamed answer, in ``least`` pieces or more.

    ``on_piece`` is called when ``number`` pieces of it were heard.
    """
    params = [{"max_tokens": tokens, "seed": 7, "speaker": "ethan", "language": "English", **talkers}, {}]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hello world"}], "stream": True}
    data = json.dumps({**body, "sampling_params_list": params}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", data, {"Content-Type": "application/json"})
    heard: list[bytes] = []
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event["error"]
            for choice in event["choices"]:
                if sound := choice["delta"].get("audio", {}).get("data"):
                    with wave.open(io.BytesIO(base64.b64decode(sound))) as file:
                        heard.append(file.readframes(file.getnframes()))
                    if len(heard) == number:
                        on_piece()
    assert len(heard) >= least
    return b"".join(heard)
