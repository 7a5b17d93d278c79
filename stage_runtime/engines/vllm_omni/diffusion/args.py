"""The ``engine_args`` of a diffusion stage of vLLM-Omni, and what is refused by them. Pure.

``max_side_px`` and ``untested_pipeline`` are read here; all others go to vLLM-Omni.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ConfigError
from stage_runtime.engines.base import checked_args
from stage_runtime.engines.vllm_omni.args import check_only

#: What every pipeline is asked for; vLLM-Omni has no list of what each of them reads.
PARAMETERS: Final = frozenset(
    ("prompt", "negative_prompt", "num_inference_steps", "guidance_scale", "true_cfg_scale", "height", "width")
)
#: Pipelines that were run with this engine, by the class in ``model_index.json``, with what else they can be given.
RUN: Final[Mapping[str, frozenset[str]]] = {
    "QwenImagePipeline": frozenset(
        ("prompt_embeds", "prompt_embeds_mask", "negative_prompt_embeds", "negative_prompt_embeds_mask")
    ),
}
#: The sizes of vLLM-Omni's ``parallel_config``: a replica is one process.
SIZES: Final = (
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "sequence_parallel_size"),
    *("cfg_parallel_size", "ulysses_degree", "ring_degree", "allgather_degree", "vae_patch_parallel_size", "num_gpus"),
)
_ALONE: Final = "a replica draws in one process; run more replicas"
_WHOLE: Final = "a picture is drawn in one call, which is stopped between two of its steps, and handed over whole"
_ONLY: Final[Mapping[str, tuple[Any, str]]] = {
    **dict.fromkeys(SIZES, (1, _ALONE)),
    "distributed_executor_backend": ("uni", _ALONE),
    "step_execution": (False, _WHOLE),
    "streaming_output": (False, _WHOLE),
    "async_chunk": (False, _WHOLE),
}


class OmniDiffusionArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The arguments of this engine's own."""

    #: Larger pictures are refused.
    max_side_px: Annotated[int, Meta(ge=8, le=8192)] = 2048
    #: Load a pipeline that is not in ``RUN`` all the same.
    untested_pipeline: bool = False


def split_diffusion_args(stage: StageConfig) -> tuple[OmniDiffusionArgs, dict[str, Any]]:
    """The engine's own arguments, and those for vLLM-Omni. Raise ConfigError for a value that does not work here."""
    own = {name: value for name, value in stage.engine_args.items() if name in OmniDiffusionArgs.__struct_fields__}
    given = {name: value for name, value in stage.engine_args.items() if name not in own}
    sizes = given.get("parallel_config")
    check_only(stage, given, _ONLY)
    check_only(stage, sizes if isinstance(sizes, Mapping) else {}, _ONLY, "engine_args.parallel_config")
    given.pop("async_chunk", None)
    return checked_args(stage, OmniDiffusionArgs, own), given


def check_pipeline(stage: StageConfig, name: str | None, args: OmniDiffusionArgs) -> None:
    """Raise ConfigError for a pipeline that was not run with this engine, unless the document wants it."""
    if name not in RUN and not args.untested_pipeline:
        raise ConfigError(
            f"stage {stage.stage_id}: vLLM-Omni's pipeline {name!r} was not run with this engine, so it is not known"
            f" what it reads of a request, and whether it can be stopped; run were {', '.join(RUN)}."
            " engine_args.untested_pipeline: true loads it all the same"
        )
