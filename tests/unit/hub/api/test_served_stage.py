"""Which models a hub reads itself, by the API that it puts up."""

from __future__ import annotations

import pytest

from hub.api.served_stage import stages_read_here
from omni_discovery.deploy.document import parse_deploy

SPEAKING = """
stages:
  - {stage_id: 0, engine: vllm, model: /m/writer, final_output: text}
  - {stage_id: 1, engine: vllm-omni, model: /m/tts}
  - {stage_id: 2, engine: vllm-omni, model: /m/tts, final_output: audio}
"""


@pytest.mark.parametrize(("api", "read"), [("omni", ()), ("vllm", (0,)), ("vllm-omni", (0, 1))])
def test_each_model_that_is_read_in_the_hub_is_named(api: str, read: tuple[int, ...]) -> None:
    assert stages_read_here(parse_deploy(SPEAKING, "deploy.yaml"), api) == read
