"""The deploy document as a file: read, with model paths made absolute."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from omni_discovery.deploy import DeployConfig, StageConfig, parse_deploy
from omni_discovery.deploy_dialect import Overrides
from omni_discovery.errors import ConfigError


def load_deploy(
    file: Path, default_model: str | None = None, overrides: Overrides = MappingProxyType({})
) -> DeployConfig:
    """Read a deploy YAML, with ``overrides`` laid on its stages. Raise ConfigError.

    A model that begins with ``./`` or ``../`` is taken from the file's folder; a stage without one gets the default.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {file}: {error}") from error
    deploy = parse_deploy(text, str(file), overrides)
    folder = file.resolve().parent
    stages = tuple(_with_model(stage, default_model, folder) for stage in deploy.stages)
    return msgspec.structs.replace(deploy, stages=stages)


def _with_model(stage: StageConfig, default: str | None, folder: Path) -> StageConfig:
    changes: dict[str, Any] = {}
    if not stage.model and default:
        changes["model"] = default
    elif stage.model.startswith(("./", "../")):
        changes["model"] = str((folder / stage.model).resolve())
    return msgspec.structs.replace(stage, **changes)
