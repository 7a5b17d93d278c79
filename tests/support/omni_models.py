"""The stages of tiny models of vLLM-Omni as a deploy document has them."""

from __future__ import annotations

from typing import Any, Final

from omni_discovery.deploy.document import StageConfig

#: A request that the tiny model answers with 23 frames, two seconds of noise.
SPEECH: Final[dict[str, Any]] = {"max_tokens": 24, "speaker": "ethan", "language": "English", "seed": 3}
_ON_A_CPU: Final = {"enforce_eager": True, "kv_cache_memory_bytes": 32 << 20, "max_num_seqs": 4}
#: Small pieces, so that two seconds have several.
_CHUNKS: Final = {"codec_chunk_frames": 4, "initial_codec_chunk_frames": 1}


def omni_stages(model: str, *, async_chunk: bool) -> tuple[StageConfig, StageConfig]:
    """The talker, and the decoder that makes sound of its codes."""
    both = {**_ON_A_CPU, "async_chunk": async_chunk, "connector_extra": _CHUNKS}
    talker = {"max_model_len": 1024, "dtype": "bfloat16"}
    decoder = {"max_model_len": 8192, "max_num_batched_tokens": 8192, "dtype": "float32"}
    return (
        StageConfig(stage_id=0, engine="vllm-omni", model=model, engine_args={**both, **talker}),
        StageConfig(stage_id=1, engine="vllm-omni", model=model, engine_args={**both, **decoder}, final_output="audio"),
    )


#: Small pieces, so that a short answer has several.
_OMNI_CHUNKS: Final = {"codec_chunk_frames": 4, "initial_codec_chunk_frames": 2, "codec_left_context_frames": 4}
#: The talkers of Qwen's omni models are sampled; these are as vLLM-Omni's deploy file has them, but short.
OMNI_PARAMS: Final[tuple[dict[str, Any], ...]] = ({"max_tokens": 12, "temperature": 0.0}, {"max_tokens": 14}, {})


def qwen_omni_stages(model: str, *, async_chunk: bool = False, dtype: str = "float32") -> tuple[StageConfig, ...]:
    """The thinker, the talker, and the decoder that makes sound of its codes."""
    every = {**_ON_A_CPU, "async_chunk": async_chunk, "dtype": dtype, "max_model_len": 2048}
    if async_chunk:
        every |= {"connector_extra": _OMNI_CHUNKS}
    if dtype == "bfloat16":
        # Of a mixture of experts; the deploy file names the one for GPUs.
        every |= {"moe_backend": "auto"}
    decoder = {"max_num_batched_tokens": 8192, "max_model_len": 8192, "max_num_seqs": 4 if async_chunk else 1}
    return (
        StageConfig(stage_id=0, engine="vllm-omni", model=model, engine_args=every, final_output="text"),
        StageConfig(stage_id=1, engine="vllm-omni", model=model, engine_args=every),
        StageConfig(
            stage_id=2, engine="vllm-omni", model=model, engine_args={**every, **decoder}, final_output="audio"
        ),
    )
