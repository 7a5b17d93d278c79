"""Speech by espeak-ng (Debian's package), at the sample rate of the demo."""

from __future__ import annotations

import io
import shutil
import subprocess
import wave
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from scipy.signal import resample_poly

from omni_discovery.errors import ConfigError
from stage_runtime.demo.code2wav import RATE_HZ

#: Both threads only wait for espeak-ng.
_THREADS: Final = 2


@dataclass(frozen=True, slots=True)
class Voice:
    """How espeak-ng speaks: its voice, words in a minute, and pitch (0 to 99)."""

    name: str = "en-us"
    speed: int = 150
    pitch: int = 50


#: The voice that the talker and the vocoder learn.
DEMO_VOICE: Final = Voice()


def speak(words: Sequence[str], voice: Voice = DEMO_VOICE) -> np.ndarray[Any, np.dtype[np.int16]]:
    """The samples of a sentence. The same for the same words and voice. Raise ConfigError without espeak-ng."""
    command = shutil.which("espeak-ng")
    if command is None:
        raise ConfigError("espeak-ng is not installed: apt-get install espeak-ng")
    flags = ["-v", voice.name, "-s", str(voice.speed), "-p", str(voice.pitch), "--stdout"]
    file = subprocess.run([command, *flags, " ".join(words)], check=True, capture_output=True).stdout
    with wave.open(io.BytesIO(file)) as made:
        rate_hz = made.getframerate()
        # The length in the header of a stream is not the true one.
        samples = np.frombuffer(made.readframes(1 << 24), dtype=np.int16)
    resampled = resample_poly(samples.astype(np.float64), RATE_HZ, rate_hz)
    clipped: np.ndarray[Any, np.dtype[np.int16]] = np.clip(np.rint(resampled), -32768, 32767).astype(np.int16)
    return clipped


def speak_all(
    sentences: Sequence[Sequence[str]], voices: Sequence[Voice] = ()
) -> list[np.ndarray[Any, np.dtype[np.int16]]]:
    """The samples of each sentence, in the voice beside it; without voices, in that of the demo."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(speak, sentences, voices or [DEMO_VOICE] * len(sentences)))
