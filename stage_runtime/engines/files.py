"""Files of engines: arrays as .npy, pictures as PNG, sound as WAV; and a model's files, checked and hashed."""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import wave
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

import omni_discovery
from omni_discovery import __version__
from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ConfigError

#: A file of safetensors begins with the length of its header, which is JSON and says how much follows.
_LENGTH_BYTES: Final = 8
_LONGEST_HEADER_BYTES: Final = 100_000_000
_LFS: Final = b"version "
#: Files of which all is read, and files of which samples are.
_WORDS: Final = frozenset((".json", ".txt", ".model", ".jinja", ".tiktoken", ".yaml", ".py"))
_WEIGHTS: Final = frozenset((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".onnx"))
_MOST_FILES: Final = 2000
_WHOLE_BYTES: Final = 64 << 20
_HEAD_BYTES: Final = 64 << 10
_SAMPLES: Final = 16
_SAMPLE_BYTES: Final = 4096
#: Libraries whose version may change a model's output.
_LIBRARIES: Final = ("vllm", "torch", "transformers", "diffusers")


def npy_of(numbers: Any) -> bytes:
    """An array or tensor of real numbers, of any shape, as the bytes of a .npy file of little-endian float32.

    Tensors are copied to the host first. Raise ValueError for any other type of element.
    """
    if hasattr(numbers, "detach"):
        # An array has no bfloat16.
        numbers = numbers.detach().float().cpu().numpy()
    array = np.asarray(numbers)
    if array.dtype.kind not in "fiu":
        raise ValueError(f"what is pooled is numbers, not {array.dtype} of shape {array.shape}")
    file = io.BytesIO()
    np.save(file, np.ascontiguousarray(array, dtype="<f4").reshape(array.shape), allow_pickle=False)
    return file.getvalue()


def png_of(image: Any) -> bytes:
    """A PIL image as the bytes of a PNG file."""
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def wav_of(samples: Any, sample_rate_hz: int) -> bytes:
    """One channel of sound as the bytes of a WAV file of 16 bits a sample.

    ``samples`` is an array or tensor of floats of shape [samples], from -1 to 1; values outside are clipped. Raise
    ValueError for another shape or type, and for samples that are not finite.
    """
    if hasattr(samples, "detach"):
        samples = samples.detach().float().cpu().numpy()
    array = np.asarray(samples)
    if array.ndim != 1 or array.dtype.kind != "f":
        raise ValueError(f"sound is one row of floats from -1 to 1, not {array.dtype} of shape {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError("the sound holds what is no number")
    scaled = np.rint(np.clip(array, -1.0, 1.0) * 32767.0).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(sample_rate_hz)
        writer.writeframes(scaled.tobytes())
    return file.getvalue()


def check_model_files(stage: StageConfig, folder: Path) -> None:
    """Raise ConfigError that names the file if ``folder`` lacks a file that vLLM needs, or has it cut short or damaged.

    Only headers and sizes are read, so a model of many gigabytes takes milliseconds.
    """
    configs = ("config.json", "params.json")
    if "hf_config_path" not in stage.engine_args and not any((folder / name).is_file() for name in configs):
        raise ConfigError(f"stage {stage.stage_id}: no config.json in {folder}: it holds no model, or not all of one")
    if stage.engine_args.get("load_format") == "dummy":
        return
    for file in sorted(folder.glob("*.safetensors")):
        try:
            defect = _defect(file)
        except OSError as error:
            defect = f"can't be read ({error.strerror}): correct that, or copy it again"
        if defect:
            raise ConfigError(f"stage {stage.stage_id}: {file} {defect}")


def _defect(file: Path) -> str:
    size = file.stat().st_size
    with file.open("rb") as opened:
        begin = opened.read(_LENGTH_BYTES)
        if begin == _LFS:
            return "is Git LFS's place holder of the weights: fetch them with 'git lfs pull'"
        data_at = _LENGTH_BYTES + int.from_bytes(begin, "little")
        if len(begin) < _LENGTH_BYTES or data_at > size:
            return "is cut short: copy it again"
        if data_at > _LONGEST_HEADER_BYTES:
            return "is damaged: copy it again"
        header = opened.read(data_at - _LENGTH_BYTES)
    try:
        tensors = json.loads(header)
        ends = [int(each["data_offsets"][1]) for name, each in tensors.items() if name != "__metadata__"]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return "is damaged: copy it again"
    return "is cut short: copy it again" if data_at + max(ends, default=0) > size else ""


def content_hash(files: Iterable[Path], root: Path) -> str:
    """A hash of files, as 16 hex digits. Raise OSError.

    It covers the paths below ``root``, the sizes, the content of small files and texts, and samples of large weights.
    """
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
    """The texts and weights that make a model, sorted, at most 2000; logs, documents and hidden files are left out."""
    return sorted(_walk(folder))[:_MOST_FILES]


def code_version() -> str:
    """The version and a hash of this project's source, and the versions of the model libraries that are loaded."""
    packages = (Path(omni_discovery.__file__).parent, Path(__file__).parents[1])
    total = hashlib.blake2b(digest_size=4)
    for package in packages:
        total.update(content_hash(sorted(package.rglob("*.py")), package).encode())
    loaded = [(name, getattr(sys.modules.get(name), "__version__", None)) for name in _LIBRARIES]
    others = [f"{name} {version}" for name, version in loaded if version]
    return "; ".join([f"omni-discovery {__version__}+{total.hexdigest()}", *others])


def _walk(folder: Path) -> Iterator[Path]:
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        for name in names:
            file = Path(path, name)
            if file.suffix in _WORDS | _WEIGHTS and not name.startswith("."):
                yield file
