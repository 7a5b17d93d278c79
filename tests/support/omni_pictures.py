"""A tiny Qwen-Image as a stage of vLLM-Omni, as a deploy document has it."""

from __future__ import annotations

from typing import Any, Final

from omni_discovery.deploy.document import StageConfig

#: A picture of 64 x 64, of four steps.
PICTURE: Final[dict[str, Any]] = {"height": 64, "width": 64, "num_inference_steps": 4, "seed": 3}
#: The tiny model's text encoder computes in float32 whatever the rest does.
ON_A_CPU: Final[dict[str, Any]] = {"enforce_eager": True, "dtype": "float32"}


def picture_stage(model: str, stage_id: int = 0, **engine_args: Any) -> StageConfig:
    """The stage that draws; behind any other stage, if it has a number above 0."""
    given = {**ON_A_CPU, **engine_args}
    return StageConfig(stage_id=stage_id, engine="vllm-omni", model=model, engine_args=given, final_output="image")
