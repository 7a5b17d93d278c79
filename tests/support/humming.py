"""What a stage of sound runs for the dashboard: a hum for each word, in pieces, without a model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

RATE_HZ = 16_000
#: Seconds of sound for each word, and how long each takes.
_WORD_S, _TAKES_S = 0.25, 0.05


@dataclass
class Words:
    """The hand-off of an echo engine: its text in bytes."""

    token_ids: npt.NDArray[np.int64]


def hum(words: Words) -> Iterator[npt.NDArray[np.float32]]:
    """A tone for each word, its pitch by the word's length."""
    for word in bytes(words.token_ids.astype(np.uint8)).decode().split():
        at = np.arange(int(_WORD_S * RATE_HZ)) / RATE_HZ
        loudness = np.sin(np.pi * at / _WORD_S) * 0.3
        time.sleep(_TAKES_S)
        yield (np.sin(2 * np.pi * (180 + 30 * len(word)) * at) * loudness).astype(np.float32)
