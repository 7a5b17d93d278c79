"""Changes a loaded model of vLLM-Omni where a request that it should serve would end the engine, or change others."""

from __future__ import annotations

from typing import Any, Final

#: The marks of speech that a Qwen3-Omni talker goes on with behind the thinker's text, in its own space.
_LATER_MARKS: Final = ("tts_eos_embed", "tts_pad_embed")


def mend_model(kind: str, model_stage: str | None, runner: Any) -> None:
    """Change a loaded stage of a pipeline, if it is one of those."""
    match kind, model_stage:
        case "qwen2_5_omni", "talker":
            _talk_without_penalties(runner.get_model())
        case "qwen3_omni_moe", "talker":
            _keep_marks_apart(runner.get_model())


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


def _keep_marks_apart(model: Any) -> None:
    """Have the talker end each request with the marks of its own hand-off.

    vLLM-Omni keeps those of the newest one, for all. Here they lie with what it keeps of the request.
    """
    preprocess = model.preprocess

    def preprocess_with_own_marks(*args: Any, **kept: Any) -> Any:
        for name in _LATER_MARKS:
            if (own := kept.get("embed", {}).get(name)) is not None:
                setattr(model, name, own)
        token_ids, embeds, update = preprocess(*args, **kept)
        for name in _LATER_MARKS:
            # A prefill makes them; what is kept already need not be copied with each token.
            if (mark := getattr(model, name)) is not kept.get("embed", {}).get(name):
                update.setdefault("embed", {})[name] = mark
        return token_ids, embeds, update

    model.gpu_resident_buffer_keys |= {("embed", name) for name in _LATER_MARKS}
    model.set_custom_preprocess(preprocess_with_own_marks)
