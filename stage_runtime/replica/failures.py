"""Classify an engine's exception: too little memory, a broken model file, or a bug. Pure."""

from __future__ import annotations

from typing import Final

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ConfigError
from omni_discovery.text import one_line
from stage_runtime.config import EngineDeadError
from stage_runtime.engines.errors import lacks_memory

_MEMORY_ADVICE: Final = (
    "give the stage more or other devices, stop what else uses them, or ask less of engine_args (max_model_len, "
    "max_num_seqs, gpu_memory_utilization, a smaller dtype)"
)
#: The file is truncated or of another format; a restart would read the same bytes.
_BROKEN_FILE_TYPES: Final = frozenset({"SafetensorError", "UnpicklingError"})
#: vLLM's words for a model without files in the formats that it may read.
_NO_WEIGHTS: Final = "cannot find any model weights"
_MOST_CHARACTERS: Final = 400


def is_known(error: BaseException) -> bool:
    """Whether one line explains the error; any other error is logged with its traceback."""
    return lacks_memory(error) or _is_broken_file(error)


def not_loaded(stage: StageConfig, error: Exception) -> ConfigError | EngineDeadError:
    """The error of a model that could not be loaded: ConfigError if a restart would fail in the same way."""
    if _is_broken_file(error):
        failure = f"the model {stage.model} has a file that can't be read; fetch it anew"
        return ConfigError(f"stage {stage.stage_id}: {failure} ({describe_failure(error)})")
    if _NO_WEIGHTS in str(error).lower():
        hint = (
            "the model has no safetensors; other weights, which can run code, are read from a file's pipeline, or from"
            " that in etcd where this host allows it: --allow pickled-weights"
        )
        return ConfigError(f"stage {stage.stage_id}: engine_args.load_format: {hint} ({describe_failure(error)})")
    return EngineDeadError(f"could not be loaded: {describe_failure(error)}")


def describe_failure(error: BaseException) -> str:
    """One line of at most 400 characters for the record and the log: the error and, if known, what to do."""
    text = one_line(str(error))
    if len(text) > _MOST_CHARACTERS:
        text = text[: _MOST_CHARACTERS - 4] + " ..."
    failure = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f"too little memory: {failure}; {_MEMORY_ADVICE}" if lacks_memory(error) else failure


def _is_broken_file(error: BaseException) -> bool:
    return type(error).__name__ in _BROKEN_FILE_TYPES
