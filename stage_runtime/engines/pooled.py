"""Numbers that a stage has pooled of its input, as a file: an array in, .npy out."""

from __future__ import annotations

import io
from typing import Any

import numpy as np


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
