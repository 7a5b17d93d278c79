"""What a replica has loaded, in a few short words for its record: enough to see that two replicas are not the same."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from omni_discovery import __version__
from omni_discovery.deploy.document import DeployConfig
from omni_discovery.deploy.fingerprint import stage_fingerprint
from stage_runtime.engines.capabilities import capabilities_of
from stage_runtime.engines.files import code_version, content_hash, model_files

logger = logging.getLogger(__name__)

#: The fields of the record that an engine may fill by its attribute ``model_details``.
FIELDS: Final = ("revision", "dtype", "tokenizer", "content", "code")
_LONGEST: Final = 200
_TOKENIZER: Final = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")


def identity(deploy: DeployConfig, stage_id: int) -> dict[str, str]:
    """The fields of the record that say what a replica is to be, before it has loaded anything."""
    model, fingerprint = deploy.stage(stage_id).model, stage_fingerprint(deploy, stage_id)
    return {"model": model, "fingerprint": fingerprint, "version": __version__}


def model_details(model: str, engine: object) -> dict[str, str]:
    """The fields of the record that say what a loaded engine has; those that nobody knows are left out.

    What the engine says itself, by a mapping ``model_details``, counts more than what its model's folder shows. Of a
    model that is no local folder, its revision is its content.
    """
    found = dict(_of_folder(Path(model).expanduser() if model else None))
    said = capabilities_of(engine).model_details()
    found.update((name, str(said[name])) for name in FIELDS if said.get(name))
    if "code" not in found:
        found["code"] = code_version()
    if "revision" in found:
        found.setdefault("content", found["revision"])
    return {name: text[:_LONGEST] for name, text in found.items()}


def _of_folder(folder: Path | None) -> dict[str, str]:
    if folder is None or not folder.is_dir():
        return {}
    try:
        files = model_files(folder)
        tokenizer = [file for file in files if _is_tokenizer(file)]
        found = {"content": content_hash(files, folder)}
        return {**found, "tokenizer": content_hash(tokenizer, folder)} if tokenizer else found
    except OSError as error:
        logger.warning("replica.content_unknown folder=%s: %s", folder, error)
        return {}


def _is_tokenizer(file: Path) -> bool:
    return file.name.startswith(_TOKENIZER) or file.suffix in (".model", ".tiktoken")
