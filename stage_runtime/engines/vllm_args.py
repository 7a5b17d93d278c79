"""A vLLM stage's ``engine_args`` as vLLM's own, and the engine made of them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ConfigError
from omni_discovery.text import essence
from stage_runtime.engines.base import check_model_folder, checked_args
from stage_runtime.engines.model_files import check_model_files
from stage_runtime.failures import lacks_memory

#: What vLLM runs at once when ``max_num_seqs`` is not given.
_USUAL_CAPACITY: Final = 256


def take_allow_rpc(stage: StageConfig, given: dict[str, Any]) -> tuple[str, ...]:
    """Take ``allow_rpc``, which is ours, out of a stage's arguments. Raise ConfigError."""
    return checked_args(stage, tuple[str, ...], given.pop("allow_rpc", ()), "engine_args.allow_rpc")


def usual_capacity(given: Mapping[str, Any]) -> int:
    """How many requests vLLM would run at once, as far as that can be said before it has loaded."""
    return int(given.get("max_num_seqs", _USUAL_CAPACITY))


def check_model(stage: StageConfig) -> None:
    """Raise ConfigError if the stage's model is a folder here that can't be loaded."""
    if check_model_folder(stage):
        check_model_files(stage, Path(stage.model).expanduser())


def engine_args_of(stage: StageConfig, given: Mapping[str, Any], kind: Any) -> Any:
    """The EngineArgs, of class ``kind``, for a stage. Raise ConfigError that names what this vLLM has not."""
    known = set(kind.__dataclass_fields__)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ConfigError(f"stage {stage.stage_id}: vLLM has no engine_args.{name}{hint}")
    # Its spans are made of its stats: without them, the first request would end it.
    quiet = {"disable_log_stats": not given.get("otlp_traces_endpoint"), "use_tqdm_on_load": False}
    ours = {"model": stage.model, **{name: value for name, value in quiet.items() if name in known}}
    try:
        return kind(**{**ours, **given})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"stage {stage.stage_id}: engine_args: {essence(error)}") from error


def load_llm(stage: StageConfig, given: Mapping[str, Any]) -> Any:
    """A loaded LLMEngine, all of it in this process. Raise ConfigError where the operator must act."""
    from vllm import EngineArgs, LLMEngine

    arguments = engine_args_of(stage, given, EngineArgs)
    try:
        llm = LLMEngine.from_engine_args(arguments, enable_multiprocessing=False)
    except (ValueError, OSError) as error:
        if lacks_memory(error):
            # What else needs it may be about to end.
            raise
        if isinstance(error, ValueError):
            raise ConfigError(f"stage {stage.stage_id}: vLLM refuses model or engine_args: {essence(error)}") from error
        if check_model_folder(stage):
            raise ConfigError(f"stage {stage.stage_id}: {stage.model}: {essence(error)}") from error
        raise
    if llm.vllm_config.model_config.runner_type == "pooling" and given.get("runner") != "pooling":
        raise ConfigError(f"stage {stage.stage_id}: this model pools, as vLLM has it: set final_output: embedding")
    return llm
