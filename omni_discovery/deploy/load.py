"""A deploy document's file: read it, with model paths made absolute; describe differences and possible slips."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from omni_discovery.deploy.checks import doubt_of_engine, nearest
from omni_discovery.deploy.dialect import CONNECTORS, Overrides
from omni_discovery.deploy.document import DeployConfig, StageConfig, parse_deploy, short_value
from omni_discovery.deploy.trust.bounds import Bounds
from omni_discovery.deploy.trust.judge import is_under, model_texts
from omni_discovery.errors import ConfigError
from omni_discovery.plugins import CONNECTOR_GROUPS, ENGINE_GROUPS, find_plugins
from omni_discovery.processes import check_unshared


def load_deploy(
    file: Path, default_model: str | None = None, overrides: Overrides = MappingProxyType({})
) -> DeployConfig:
    """Read a deploy YAML and merge ``overrides`` into its stages. Raise ConfigError.

    A model that begins with ``./`` or ``../`` is relative to the file's folder; a stage without one gets the default.
    Edges may name connectors of installed packages.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {file}: {error}") from error
    connectors, engines = find_plugins(CONNECTOR_GROUPS), find_plugins(ENGINE_GROUPS)
    deploy = parse_deploy(text, str(file), overrides, connectors, engines)
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


def locate_model(text: str) -> tuple[str, ...]:
    """Return the paths that a model's text stands for here: as written, and with all links followed.

    Empty for a text that looks like no path while no folder has that name here: the name of a model on a model hub.
    """
    path = Path(text).expanduser() if text.startswith("~") else Path(text)
    try:
        looks_like_one = text.startswith(("/", ".", "~")) or ".." in path.parts or path.exists()
        if not looks_like_one:
            return ()
        written, real = Path.cwd() / path, path.resolve()
    except (OSError, ValueError, RuntimeError):
        # A text that no path can be, too long for one, or with a user that is not there: it lies under no root.
        return (text,)
    # "a/link/.." is not "a": only the real path counts then.
    return (str(real),) if ".." in path.parts else tuple(dict.fromkeys((str(written), str(real))))


def check_model_places(deploy: DeployConfig, stage_id: int, bounds: Bounds) -> None:
    """Raise ConfigError for a model of this stage that another user could have put where it lies, or could swap.

    Models in folders that the operator has named as roots are left to the operator.
    """
    for text in model_texts(deploy, stage_id):
        check_model_place(text, bounds, f"stage {stage_id}: ")


def check_model_place(text: str, bounds: Bounds, place: str = "") -> None:
    """Raise ConfigError, which begins with ``place``, for such a model. A name on a model hub passes."""
    paths = locate_model(text)
    if not paths or any(is_under(path, root) for path in paths for root in bounds.named_roots):
        return
    try:
        path = Path(text).expanduser()
        if not path.is_absolute():
            check_unshared(Path.cwd())
        check_unshared(path)
    except ConfigError as error:
        raise ConfigError(
            f"{place}the model {text} is a folder here, {paths[-1]}, and not for this user alone: {error}."
            " Name a folder"
            f" that others can't change by its full path, or trust who can: --model-root {shlex.quote(paths[-1])}"
        ) from error
    except (OSError, ValueError, RuntimeError):
        # Who loads it tells what is missing, or no path.
        return


def needs_start_folder(deploy: DeployConfig, stage_id: int) -> bool:
    """Whether a model of this stage is found from the current folder, by a relative path."""
    return any(locate_model(text) and not text.startswith(("/", "~")) for text in model_texts(deploy, stage_id))


#: How many differences are described; of more, the number.
_MOST_DESCRIBED: Final = 3


def describe_difference(ours: DeployConfig, theirs: DeployConfig) -> str:
    """Describe the first three places where two documents differ; empty if they are equal."""
    mine, others = ({stage.stage_id for stage in deploy.stages} for deploy in (ours, theirs))
    differences = [
        f"stage {stage_id} only {'here' if stage_id in mine else 'in force'}" for stage_id in sorted(mine ^ others)
    ]
    differences += _differences("", _by_name(ours, mine & others), _by_name(theirs, mine & others))
    more = len(differences) - _MOST_DESCRIBED
    return "; ".join(differences[:_MOST_DESCRIBED]) + (f" (and {more} more)" if more > 0 else "")


def doubtful_engines(stages: Collection[StageConfig], installed: Collection[str]) -> list[str]:
    """Describe the stages whose engine is neither built in nor ``installed`` on this host, with the nearest name."""
    return [doubt for stage in stages if (doubt := doubt_of_engine(stage, installed))]


def doubtful_connectors(
    deploy: DeployConfig, stage_ids: Collection[int] | None, installed: Collection[str]
) -> list[str]:
    """Describe the edges whose connector is neither built in nor ``installed`` on this host, with the nearest name.

    Only edges that begin or end at one of ``stage_ids`` are looked at; None: all edges.
    """
    known = sorted({*CONNECTORS, *installed})
    doubts = []
    for stage in deploy.stages:
        for before in deploy.inputs_of(stage.stage_id):
            name = deploy.connector_of(before, stage.stage_id).name
            touches = stage_ids is None or before in stage_ids or stage.stage_id in stage_ids
            if touches and name not in known:
                place = f"the edge {before} to {stage.stage_id}"
                doubts.append(f"{place}: connector {name!r} is not known on this host; {nearest(name, known)}")
    return doubts


def _by_name(deploy: DeployConfig, shared: Collection[int]) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(deploy)
    stages = [stage for stage in document.pop("stages") if stage["stage_id"] in shared]
    named = {f"stage {stage['stage_id']}": stage for stage in stages}
    return named | document | {"order of stages": str([stage["stage_id"] for stage in stages])}


def _differences(path: str, ours: Any, theirs: Any) -> list[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        names = [*ours, *(name for name in theirs if name not in ours)]
        pairs = [(f"{path}.{name}".lstrip("."), ours.get(name), theirs.get(name)) for name in names]
    elif isinstance(ours, list | tuple) and isinstance(theirs, list | tuple) and len(ours) == len(theirs):
        pairs = [
            (f"{path}[{index}]", mine, other) for index, (mine, other) in enumerate(zip(ours, theirs, strict=True))
        ]
    else:
        return [] if ours == theirs else [f"{path}: {short_value(ours)} here, {short_value(theirs)} in force"]
    return [difference for pair in pairs for difference in _differences(*pair)]
