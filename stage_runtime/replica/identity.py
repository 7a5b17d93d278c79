"""The identity of a replica's model in its record: enough to see that two replicas serve different models.

Model, revision, dtype, hashes of the model's files and of our code, and the versions of the libraries.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from msgspec import UNSET

from omni_discovery import __version__
from omni_discovery.deploy.document import DeployConfig, StageConfig
from omni_discovery.deploy.fingerprint import stage_fingerprint
from omni_discovery.records.params import ParamBounds
from omni_discovery.records.schema import MOST_PARAMS, MOST_VOICES
from stage_runtime.engines.capabilities import capabilities_of
from stage_runtime.engines.files import code_version, content_hash, model_files

logger = logging.getLogger(__name__)

#: The fields of the record that an engine may fill by its attribute ``model_details``.
FIELDS: Final = ("revision", "dtype", "tokenizer", "content", "code")
_LONGEST: Final = 200
_LONGEST_NAME: Final = 64
_TOKENIZER: Final = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")


def identity(deploy: DeployConfig, stage_id: int) -> dict[str, str]:
    """The identity that is known before the model is loaded: model, fingerprint of the stage, our version."""
    model, fingerprint = deploy.stage(stage_id).model, stage_fingerprint(deploy, stage_id)
    return {"model": model, "fingerprint": fingerprint, "version": __version__}


def model_details(model: str, engine: object) -> dict[str, str]:
    """The identity of a loaded engine: those of FIELDS that are known, each of at most 200 characters.

    A mapping ``model_details`` of the engine wins over the model's folder. The content of a model that is no local
    folder is its revision.
    """
    details = dict(_folder_details(Path(model).expanduser() if model else None))
    by_engine = capabilities_of(engine).model_details()
    details.update((name, str(by_engine[name])) for name in FIELDS if by_engine.get(name))
    if "code" not in details:
        details["code"] = code_version()
    if "revision" in details:
        details.setdefault("content", details["revision"])
    return {name: text[:_LONGEST] for name, text in details.items()}


def is_deterministic(stage: StageConfig, engine: object) -> bool:
    """Whether a loaded engine's output is a function of input and seed: what the document says of it goes first."""
    said = stage.deterministic
    return capabilities_of(engine).is_deterministic() if said is UNSET else bool(said)


def voices_of(engine: object) -> tuple[str, ...]:
    """The voices of a loaded engine that its record can hold."""
    fitting = (name for name in capabilities_of(engine).voices() if 0 < len(name) <= _LONGEST_NAME)
    return tuple(dict.fromkeys(fitting))[:MOST_VOICES]


def params_of(stage: StageConfig, engine: object) -> dict[str, ParamBounds] | None:
    """What the parameters of a loaded engine may be, if its stage does jobs and its record can hold them.

    Requests that are answered at once are refused by the engine itself, as soon.
    """
    found = capabilities_of(engine).params() if stage.final_output == "video" else None
    if found is None or len(found) > MOST_PARAMS or not all(0 < len(name) <= _LONGEST_NAME for name in found):
        return None
    return dict(found)


def _folder_details(folder: Path | None) -> dict[str, str]:
    if folder is None or not folder.is_dir():
        return {}
    try:
        files = model_files(folder)
        tokenizer = [file for file in files if _is_tokenizer(file)]
        details = {"content": content_hash(files, folder)}
        return {**details, "tokenizer": content_hash(tokenizer, folder)} if tokenizer else details
    except OSError as error:
        logger.warning("replica.content_unknown folder=%s: %s", folder, error)
        return {}


def _is_tokenizer(file: Path) -> bool:
    return file.name.startswith(_TOKENIZER) or file.suffix in (".model", ".tiktoken")
