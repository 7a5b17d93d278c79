"""``omni serve`` with prefill and decode as two stages of one model, as a client sees it, and with a decode killed."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import msgspec
import pytest

from omni_discovery.deploy.document import encode_deploy
from tests.support.hub import Hub
from tests.support.prefill_decode import PROMPTS, pair

pytestmark = [pytest.mark.e2e, pytest.mark.vllm]

ASKED = {"temperature": 0.0, "max_tokens": 60, "stream": True}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    (tmp_path / "kv").mkdir()
    running = Hub.of_yaml(tmp_path, json.dumps(msgspec.json.decode(encode_deploy(pair(tmp_path / "kv", decoders=2)))))
    try:
        yield running.wait_ready(400)
    finally:
        running.stop(signal.SIGINT)


def stream(hub: Hub, prompt: str, began: Event | None = None) -> str:
    """What a client reads of one answer, piece after piece."""
    body = json.dumps({"messages": [{"role": "user", "content": prompt}], **ASKED}).encode()
    request = urllib.request.Request(f"{hub.url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    text = ""
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
            if began is not None and text:
                began.set()
    return text


def test_one_stream_without_gap_or_repetition_though_a_decode_replica_dies(hub: Hub) -> None:
    """1. each prompt is asked alone: the decode stage's answer is what the client reads
    2. both are asked many times over, and as the first piece comes a decode replica is killed
    3. every stream reads as before
    """
    expected = [stream(hub, prompt) for prompt in PROMPTS]
    assert all(expected)
    assert list((hub.folder / "kv").rglob("*.safetensors")), "no KV went from stage to stage"
    victim = next(record for record in hub.replicas() if record["stage_id"] == 1)
    began = Event()
    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(stream, hub, PROMPTS[index % 2], began) for index in range(16)]
        assert began.wait(60)
        os.kill(victim["pid"], signal.SIGKILL)
        said = [each.result(120) for each in streams]
    assert said == [expected[index % 2] for index in range(16)]
