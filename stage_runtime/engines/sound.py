"""Sound as a file: samples in, WAV out."""

from __future__ import annotations

import io
import wave
from typing import Any

import numpy as np


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
