"""Numbers that a stage has pooled of its input, as a file: an array in, .npy out.

Sound as a file: samples in, WAV out.

Whether the files of a model are whole, by what is cheap to read of them: before an engine takes long to stumble.
"""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path
from typing import Any, Final

import numpy as np

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ConfigError


def npy_of(numbers: Any) -> bytes:
    """An array or tensor of numbers, of any shape, as a .npy file of float32. Raise ValueError for any other."""
    if hasattr(numbers, "detach"):
        # An array has no bfloat16.
        numbers = numbers.detach().float().cpu().numpy()
    array = np.asarray(numbers)
    if array.dtype.kind not in "fiu":
        raise ValueError(f"what is pooled is numbers, not {array.dtype} of shape {array.shape}")
    file = io.BytesIO()
    np.save(file, np.ascontiguousarray(array, dtype="<f4").reshape(array.shape), allow_pickle=False)
    return file.getvalue()


def wav_of(samples: Any, sample_rate_hz: int) -> bytes:
    """One channel of floats from -1 to 1 as a WAV file of 16 bits; what lies outside is clipped.

    ``samples`` is an array or tensor of shape [samples]. Raise ValueError for any other.
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


#: A file of safetensors begins with the length of its header, which is JSON and says how much follows.
_LENGTH_BYTES: Final = 8
_LONGEST_HEADER_BYTES: Final = 100_000_000
_LFS: Final = b"version "


def check_model_files(stage: StageConfig, folder: Path) -> None:
    """Raise ConfigError that names the file if vLLM could not load a local model for want of it, or of a part of it."""
    configs = ("config.json", "params.json")
    if "hf_config_path" not in stage.engine_args and not any((folder / name).is_file() for name in configs):
        raise ConfigError(f"stage {stage.stage_id}: no config.json in {folder}: it holds no model, or not all of one")
    if stage.engine_args.get("load_format") == "dummy":
        return
    for file in sorted(folder.glob("*.safetensors")):
        try:
            wrong = _what_is_wrong(file)
        except OSError as error:
            wrong = f"can't be read ({error.strerror}): correct that, or copy it again"
        if wrong:
            raise ConfigError(f"stage {stage.stage_id}: {file} {wrong}")


def _what_is_wrong(file: Path) -> str:
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
