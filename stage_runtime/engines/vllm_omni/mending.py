"""Changes a loaded model of vLLM-Omni where a request that it should serve would end the engine instead."""

from __future__ import annotations

from typing import Any


def mend_model(kind: str, model_stage: str | None, runner: Any) -> None:
    """Change a loaded stage of a pipeline, if it is one of those."""
    if (kind, model_stage) == ("qwen2_5_omni", "talker"):
        _talk_without_penalties(runner.get_model())


def _talk_without_penalties(model: Any) -> None:
    """Have the talker leave the prompts alone where vLLM has gathered none.

    It replaces a token of them that has no place in the tables for penalties. vLLM gathers prompts for these tables
    alone: where no request of a batch has a penalty, such as one with ``repetition_penalty: 1.0``, there are none.
    """
    forward = model.forward

    def forward_with_prompts(*args: Any, sampling_metadata: Any = None, **kwargs: Any) -> Any:
        has_prompts = getattr(sampling_metadata, "prompt_token_ids", None) is not None
        return forward(*args, sampling_metadata=sampling_metadata if has_prompts else None, **kwargs)

    model.forward = forward_with_prompts
