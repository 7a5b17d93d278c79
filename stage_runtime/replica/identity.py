"""The identity of a replica's model in its record: enough to see that two replicas serve different models.

Model, revision, dtype, hashes of the model's files and of our code, and the versions of the libraries.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import omni_discovery
from omni_discovery import __version__
from omni_discovery.deploy.document import DeployConfig
from omni_discovery.deploy.fingerprint import stage_fingerprint

logger = logging.getLogger(__name__)

#: The fields of the record that an engine may fill by its attribute ``model_details``.
FIELDS: Final = ("revision", "dtype", "tokenizer", "content", "code")
_LONGEST: Final = 200
#: Files that are hashed whole, and files of which samples are hashed.
_WORDS: Final = frozenset((".json", ".txt", ".model", ".jinja", ".tiktoken", ".yaml", ".py"))
_WEIGHTS: Final = frozenset((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".onnx"))
_TOKENIZER: Final = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")
_MOST_FILES: Final = 2000
_WHOLE_BYTES: Final = 64 << 20
_HEAD_BYTES: Final = 64 << 10
_SAMPLES: Final = 16
_SAMPLE_BYTES: Final = 4096
#: Libraries whose version changes a model's output.
_LIBRARIES: Final = ("vllm", "torch", "transformers", "diffusers")


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
    by_engine: Mapping[str, Any] = getattr(engine, "model_details", None) or {}
    details.update((name, str(by_engine[name])) for name in FIELDS if by_engine.get(name))
    if "code" not in details:
        details["code"] = code()
    if "revision" in details:
        details.setdefault("content", details["revision"])
    return {name: text[:_LONGEST] for name, text in details.items()}


def content_of(files: Iterable[Path], root: Path) -> str:
    """A hash of files by their names and sizes: whole texts and small files, samples of weights. Raise OSError."""
    total = hashlib.blake2b(digest_size=8)
    for file in files:
        size_bytes = file.stat().st_size
        total.update(f"{file.relative_to(root).as_posix()}:{size_bytes}:".encode())
        is_whole = size_bytes <= (_WHOLE_BYTES if file.suffix in _WORDS else _HEAD_BYTES)
        with file.open("rb") as opened:
            total.update(opened.read(size_bytes if is_whole else _HEAD_BYTES))
            for number in range(0 if is_whole else _SAMPLES):
                opened.seek(number * (size_bytes - _SAMPLE_BYTES) // (_SAMPLES - 1))
                total.update(opened.read(_SAMPLE_BYTES))
    return total.hexdigest()


def model_files(folder: Path) -> list[Path]:
    """The configuration, tokenizer and weight files of a model in a fixed order, at most 2000; no hidden files."""
    return sorted(_walk(folder))[:_MOST_FILES]


def code() -> str:
    """Our version with a hash of our source, and the versions of the loaded libraries."""
    packages = (Path(omni_discovery.__file__).parent, Path(__file__).parents[1])
    total = hashlib.blake2b(digest_size=4)
    for package in packages:
        total.update(content_of(sorted(package.rglob("*.py")), package).encode())
    loaded = [(name, getattr(sys.modules.get(name), "__version__", None)) for name in _LIBRARIES]
    others = [f"{name} {version}" for name, version in loaded if version]
    return "; ".join([f"omni-discovery {__version__}+{total.hexdigest()}", *others])


def _folder_details(folder: Path | None) -> dict[str, str]:
    if folder is None or not folder.is_dir():
        return {}
    try:
        files = model_files(folder)
        tokenizer = [file for file in files if _is_tokenizer(file)]
        details = {"content": content_of(files, folder)}
        return {**details, "tokenizer": content_of(tokenizer, folder)} if tokenizer else details
    except OSError as error:
        logger.warning("replica.content_unknown folder=%s: %s", folder, error)
        return {}


def _is_tokenizer(file: Path) -> bool:
    return file.name.startswith(_TOKENIZER) or file.suffix in (".model", ".tiktoken")


def _walk(folder: Path) -> Iterator[Path]:
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        for name in names:
            file = Path(path, name)
            if file.suffix in _WORDS | _WEIGHTS and not name.startswith("."):
                yield file
