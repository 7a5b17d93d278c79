"""The whole product with diffusers pipelines: HTTP, hub, etcd, ZMQ, replicas, shared memory."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.engines import DEMO, as_the_supervisor_has_it
from tests.support.hub import Hub
from tests.support.pipelines import save_pixart, save_qwen_image
from tests.support.processes import wait_for

pytest.importorskip("diffusers", reason="diffusers is not installed")

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not os.environ.get("OMNI_LONG"), reason="the long form: make long"),
]

TEXT = """
stages:
  - stage_id: 0
    engine: diffusion
    model: {folder}
    engine_args:
      call_args: {{use_resolution_binning: false, clean_caption: false, max_sequence_length: 8}}
    default_sampling_params: {{num_inference_steps: 4}}
    final_output: image
"""

PAIR = """
stages:
  - stage_id: 0
    engine: vllm
    model: {thinker}
    engine_args:
      dtype: float32
      max_model_len: 128
      max_num_seqs: 4
      kv_cache_memory_bytes: 16777216
      enforce_eager: true
      handoff: {{hidden_states: true}}
    default_sampling_params: {{temperature: 0.0, max_tokens: 8, ignore_eos: true}}
    final_output: text
  - stage_id: 1
    engine: diffusion
    model: {folder}
    default_sampling_params: {{num_inference_steps: 4, height: 32, width: 32}}
    final_output: image
"""


def serve(folder: Path, text: str) -> Iterator[Hub]:
    running = Hub.of_yaml(folder, text)
    try:
        yield running.wait_ready(180.0)
    finally:
        left = running.stop()
    assert not left, running.text[-3000:]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("pixart")
    with as_the_supervisor_has_it():
        save_pixart(folder)
    yield from serve(tmp_path_factory.mktemp("hub"), TEXT.format(folder=folder))


def picture(body: dict[str, Any]) -> bytes:
    (choice,) = body["choices"]
    (part,) = choice["message"]["content"]
    return base64.b64decode(part["image_url"]["url"].removeprefix("data:image/png;base64,"))


def draw(hub: Hub, text: str, asked: dict[str, Any] | None = None, **fields: Any) -> tuple[int, dict[str, Any]]:
    return hub.ask(text, **{"modalities": ["image"], "seed": 5, "sampling_params_list": [asked or {}], **fields})


def test_a_clients_words_are_drawn(hub: Hub) -> None:
    """1. the same seed, the same picture; 2. as large as asked; 3. a negative prompt changes it"""
    status, body = draw(hub, "a red cat")
    assert status == 200, body
    assert picture(draw(hub, "a red cat")[1]) == picture(body)
    large = Image.open(io.BytesIO(picture(draw(hub, "a red cat", {"height": 32, "width": 48})[1])))
    assert large.size == (48, 32)
    status, guided = draw(hub, "a red cat", {"negative_prompt": "the blue moon"})
    assert status == 200, guided
    assert picture(guided) != picture(body)


@pytest.mark.vllm
def test_what_a_language_model_thinks_is_drawn_and_its_companion_guides(tmp_path: Path) -> None:
    """vLLM hands its hidden states over; those of a companion are what the picture is guided away from."""
    for name in ("qwen", "hub"):
        (tmp_path / name).mkdir()
    with as_the_supervisor_has_it():
        save_qwen_image(tmp_path / "qwen", embeds_size=128)
    pair = PAIR.format(thinker=DEMO / "thinker", folder=tmp_path / "qwen")
    for hub in serve(tmp_path / "hub", pair):
        asked: dict[str, Any] = {"sampling_params_list": [{}, {"true_cfg_scale": 3.0}]}
        answers = [
            draw(hub, "What is 1 + 2?", **asked),
            draw(hub, "What is 1 + 2?", **asked),
            draw(hub, "What is 4 + 5?", **asked),
            draw(hub, "What is 1 + 2?", **asked, companions={"negative": "What is 7 + 8?"}),
        ]
        assert [status for status, _ in answers] == [200] * 4, answers
        first, again, other, guided = (picture(body) for _, body in answers)
        assert first == again
        assert len({first, other, guided}) == 3


def test_a_wrong_parameter_is_the_clients_mistake(hub: Hub) -> None:
    status, body = draw(hub, "a red cat", {"height": 30})
    assert status == 400
    assert "height: 30 is no multiple of 4 pixels" in body["error"]["message"]


def test_a_request_that_is_given_up_frees_the_stage_between_two_steps(hub: Hub) -> None:
    """1. a thousand steps of large pictures have a second's time; 2. soon after it the stage has nothing to do"""
    status, body = draw(hub, "a red cat", {"num_inference_steps": 1000, "height": 256, "width": 256}, timeout=1.0)
    assert status == 504, body
    wait_for("an idle stage", lambda: all(record["queue_length"] == 0 for record in hub.replicas()))
    status, body = draw(hub, "a red cat")
    assert status == 200, body
