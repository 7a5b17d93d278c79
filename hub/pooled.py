"""Numbers that a stage has pooled, read from the file that they travel as. Pure; needs numpy, which a hub does not."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from omni_discovery.errors import ConfigError, EngineFailedError

if TYPE_CHECKING:
    import numpy as np


def array_of(file: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A .npy file as an array of float32. Raise EngineFailedError if it is none, ConfigError without numpy."""
    try:
        import numpy as np
    except ImportError as error:
        raise ConfigError("to read an embedding as an array takes numpy: pip install numpy") from error
    try:
        # Never what would run on reading: such a file may hold objects, too.
        read = np.load(io.BytesIO(file), allow_pickle=False)
    except Exception as error:
        # Of any kind: numpy has Python's own tokenizer and parser read the file's header.
        raise EngineFailedError(f"what a stage pooled is no .npy file of numbers: {error}") from error
    if not isinstance(read, np.ndarray) or read.dtype != np.float32:
        raise EngineFailedError("what a stage pooled is no .npy file of float32")
    return read
