"""A vLLM stage's ``engine_args`` as vLLM's own."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from omni_discovery.deploy import StageConfig
from omni_discovery.errors import ConfigError


def engine_args_of(stage: StageConfig, given: Mapping[str, Any], kind: Any) -> Any:
    """The EngineArgs, of class ``kind``, for a stage. Raise ConfigError that names what this vLLM has not."""
    known = set(kind.__dataclass_fields__)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ConfigError(f"stage {stage.stage_id}: vLLM has no engine_args.{name}{hint}")
    quiet = {"disable_log_stats": True, "use_tqdm_on_load": False}
    ours = {"model": stage.model, **{name: value for name, value in quiet.items() if name in known}}
    try:
        return kind(**{**ours, **given})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"stage {stage.stage_id}: engine_args: {error}") from error
