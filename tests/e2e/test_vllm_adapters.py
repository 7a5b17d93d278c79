"""``omni serve --api vllm`` with adapters and with pictures, as a user sees it: what no replica was told in time."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract.test_engine_control import build_adapter
from tests.contract.test_vllm_items import IMAGE_TOKENS, TEXT, build_model, data_url, picture
from tests.support.engines import DEMO
from tests.support.hub import Hub
from tests.support.processes import wait_for

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.vllm,
    pytest.mark.skipif(not os.environ.get("OMNI_LONG"), reason="the long form: make long"),
]

YAML = """
model: m
stages:
  - stage_id: 0
    engine: vllm
    model: {model}
    engine_args:
      {{dtype: float32, max_model_len: 128, max_num_seqs: 4, kv_cache_memory_bytes: 33554432, enforce_eager: true,
        {more}}}
    final_output: text
"""
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "temperature": 0, "max_tokens": 8}


def said(answer: tuple[int, dict[str, Any]]) -> str:
    status, body = answer
    assert status == 200, body
    return str(body["choices"][0]["message"]["content"])


def test_a_replica_that_comes_back_answers_with_the_adapter_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. the hub has one adapter from its start, and gets another one while it runs; both are listed and asked
    2. the replica is killed; the one in its place was told of no adapter, and says the same words with each
    """
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    path = tmp_path / "adapter"
    path.mkdir()
    build_adapter(path)
    yaml = YAML.format(model=DEMO / "thinker", more="enable_lora: true, max_lora_rank: 8, max_loras: 2")
    hub = Hub.of_yaml(tmp_path, yaml, "--api", "vllm", f"--api-args=--lora-modules sql={path}")
    try:
        hub.wait_ready(200)
        without, with_it = (said(hub.post({**ASK, "model": model})) for model in ("m", "sql"))
        assert with_it != without
        named = {"lora_name": "added", "lora_path": str(path)}
        added = httpx.post(f"{hub.url}/v1/load_lora_adapter", json=named, timeout=60)
        assert added.status_code == 200, added.text
        assert '"added"' in hub.get("/v1/models")[1]
        assert said(hub.post({**ASK, "model": "added"})) == with_it
        (record,) = hub.replicas()
        os.kill(record["pid"], signal.SIGKILL)
        wait_for("another one", lambda: any(each["pid"] != record["pid"] for each in hub.replicas()), 60)
        hub.wait_ready(200)
        assert [said(hub.post({**ASK, "model": model})) for model in ("added", "sql", "m")] == [with_it] * 2 + [without]
    finally:
        left = hub.stop()
    assert not left, hub.text[-3000:]


def test_a_picture_reaches_the_stage_through_the_front_door(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    yaml = YAML.format(model=build_model(folder), more="limit_mm_per_prompt: {image: 1}")
    hub = Hub.of_yaml(tmp_path, yaml, "--api", "vllm", "--api-args=--chat-template-content-format openai")
    try:
        hub.wait_ready(200)
        shown = {"type": "image_url", "image_url": {"url": data_url(picture("red"))}}
        texts, counts = [], []
        for parts in ([shown, TEXT], [TEXT]):
            status, body = hub.post({**ASK, "model": "m", "messages": [{"role": "user", "content": parts}]})
            assert status == 200, body
            texts.append(body["choices"][0]["message"]["content"])
            counts.append(body["usage"]["prompt_tokens"])
        assert texts[0] != texts[1]
        assert counts[0] - counts[1] == IMAGE_TOKENS
    finally:
        left = hub.stop()
    assert not left, hub.text[-3000:]
