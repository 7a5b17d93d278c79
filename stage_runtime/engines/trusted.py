"""The stage that a replica may run here: judged before anything is imported that its document names."""

from __future__ import annotations

import inspect
import types
from typing import Any

from omni_discovery.deploy.document import DeployConfig, StageConfig
from omni_discovery.deploy.load import check_model_places, locate_model
from omni_discovery.deploy.trust.bounds import ALL, Bounds, is_below
from omni_discovery.deploy.trust.judge import check_document, refusal, within


def trusted_stage(deploy: DeployConfig, stage_id: int, bounds: Bounds) -> StageConfig:
    """The stage of a document as it may run here. Raise ConfigError with what this host would have to allow.

    A document of this host's own command line is trusted as it is, but for models that another user could have put
    where it has them.
    """
    check_document(deploy, stage_id, bounds, locate_model)
    check_model_places(deploy, stage_id, bounds)
    stage = deploy.stage(stage_id)
    if bounds.trusts(deploy):
        return stage
    if stage.engine == "torch":
        _check_origin(stage, bounds)
    return within(stage, bounds)


def _check_origin(stage: StageConfig, bounds: Bounds) -> None:
    """Raise ConfigError for a target that an allowed module has only imported: ``my_models:subprocess.call``."""
    # Lazy: only a stage of this engine needs numpy and the rest.
    from stage_runtime.engines.base import checked_args
    from stage_runtime.engines.callable.target import TorchArgs, check_target, find_object

    args = checked_args(stage, TorchArgs)
    check_target(stage, args)
    module, _, path = args.target.partition(":")
    allowed = bounds.allowed_modules()
    names = path.split(".")
    for count, name in enumerate(names, start=1):
        found = find_object(stage, f"{module}:{'.'.join(names[:count])}")
        home = _home_of(found)
        if name.startswith("_") or (home is not None and not is_below(home, allowed)):
            told = "is private" if name.startswith("_") else f"is of module {home!r}"
            flag = f"--allow {ALL}" if name.startswith("_") else f"--allow target={home}"
            told = f"engine_args.target {args.target!r}: {name!r} {told}"
            raise refusal(stage.stage_id, told, flag)


def _home_of(found: Any) -> str | None:
    """The module that something was written in; None for an object that a module has made, whatever its class."""
    if isinstance(found, types.ModuleType):
        return found.__name__
    if inspect.isclass(found) or inspect.isroutine(found):
        return str(getattr(found, "__module__", None) or "builtins")
    return None
