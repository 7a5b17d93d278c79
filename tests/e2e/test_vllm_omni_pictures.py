"""The whole product with a diffusion pipeline of vLLM-Omni behind a stage that writes: HTTP, hub, etcd, replicas.

Needs the environment that `make omni-test` makes.
"""

from __future__ import annotations

import base64
import io
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from PIL import Image

from tests.support.attackers import cpu_s
from tests.support.hub import Hub
from tests.support.omni_cluster import MARKS, PYTHON, hub_with, write_model
from tests.support.processes import wait_for

pytestmark = MARKS

DEPLOY = """
model: tiny-pictures
stages:
  - stage_id: 0
    engine: torch
    engine_args: {{target: "tests.support.callables:hand_text_on"}}
    runtime: {{devices: cpu}}
  - stage_id: 1
    engine: vllm-omni
    model: {model}
    engine_args: {{enforce_eager: true, dtype: float32, max_num_seqs: 2}}
    default_sampling_params: {{height: 64, width: 64, num_inference_steps: 4}}
    runtime: {{devices: cpu, num_replicas: 2, python: {python}}}
    final_output: image
"""
_READY_S = 300.0
#: More processor time than an idle replica spends in half a minute, and a fraction of what a long picture takes.
_WORK_S = 0.5


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("omni")
    model = write_model(folder, "tiny_qwen_image")
    with hub_with(folder, DEPLOY.format(model=model, python=PYTHON)) as running:
        yield running


def draw(hub: Hub, text: str, asked: dict[str, Any] | None = None, **fields: Any) -> tuple[int, dict[str, Any]]:
    return hub.ask(text, **{"modalities": ["image"], "seed": 5, "sampling_params_list": [{}, asked or {}], **fields})


def picture(body: dict[str, Any]) -> bytes:
    (choice,) = body["choices"]
    (part,) = choice["message"]["content"]
    return base64.b64decode(part["image_url"]["url"].removeprefix("data:image/png;base64,"))


def painters(hub: Hub) -> list[int]:
    """The process ids of the replicas that draw."""
    return [each["pid"] for each in hub.replicas() if each["stage_id"] == 1]


def test_words_of_one_stage_are_drawn_by_the_next_and_a_companion_leads_away(hub: Hub) -> None:
    answers = [
        draw(hub, "a red cat"),
        draw(hub, "a red cat"),
        draw(hub, "the blue moon"),
        draw(hub, "a red cat", {"true_cfg_scale": 4.0}, companions={"negative": "the moon"}),
    ]
    assert [status for status, _ in answers] == [200] * 4, answers
    first, again, other, led = (picture(body) for _, body in answers)
    assert Image.open(io.BytesIO(first)).size == (64, 64)
    assert first == again
    assert len({first, other, led}) == 3
    status, body = draw(hub, "a red cat", {"height": 30})
    assert (status, "height: 30 is no multiple of 16 pixels" in str(body)) == (400, True)


def test_a_picture_is_drawn_again_where_its_replica_dies(hub: Hub) -> None:
    """1. a long picture, by either replica, is what it always is; 2. the one that draws it is killed: it is the same"""
    asked = {"num_inference_steps": 1000}
    status, body = draw(hub, "a red cat", asked)
    assert status == 200, body
    wait_for("both painters", lambda: len(painters(hub)) == 2, _READY_S)
    idle = {pid: cpu_s(pid) for pid in painters(hub)}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(draw, hub, "a red cat", asked)
        busy = wait_for(
            "a painter at work", lambda: [pid for pid, spent in idle.items() if cpu_s(pid) > spent + _WORK_S]
        )
        os.kill(busy[0], signal.SIGKILL)
        status, again = answer.result(120.0)
    assert status == 200, again
    assert picture(again) == picture(body)
    assert "replica.lost_at_work replica=1/" in hub.text
